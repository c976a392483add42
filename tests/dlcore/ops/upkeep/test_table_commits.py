"""The machine that lets a table follow its log: no I/O, and a store that lies."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    CorruptMetadataError,
    DLError,
    ObjectStoreError,
    TableError,
    UnsupportedError,
)
from dlcore.base.steps import CallFailed, Ended
from dlcore.log.cold.delta_format import DELTA
from dlcore.log.cold.table_format import TableFile, TableFiles, TableSeen
from dlcore.ops.upkeep import table_commits
from dlcore.ops.upkeep.table_commits import (
    ATTEMPTS_MAX,
    AddFields,
    Chain,
    ChainRead,
    Commit,
    Create,
    Effect,
    Event,
    Followed,
    Look,
    Looked,
    ObjectAt,
    ReadChain,
    Signal,
    TableCommits,
    TableState,
    Tidy,
)
from tests.fixtures.lengths import amount, for_each
from tests.fixtures.nodes import refused

if TYPE_CHECKING:
    from dlcore.log.cold.table_format import Field, Place

LOST = ObjectStoreError("503")
X: Field = {"name": "x", "type": "long", "nullable": True, "metadata": {}}
Y: Field = {"name": "y", "type": "string", "nullable": True, "metadata": {}}
FIRST: Place = (1, 0)


def at(lssn: int, start: int, end: int, *, name: str = "") -> ObjectAt:
    """Return an object with two records in each entry."""
    found = name or f"{lssn}/7-t-{start}-1.parquet"
    return ObjectAt(found, 100, (lssn, start), (lssn, end), 2 * (end - start))


def as_file(found: ObjectAt) -> TableFile:
    """Return the file of an object."""
    return TableFile(found.name, found.size_bytes, found.end, found.records)


SAME = Chain(FIRST, (1, 6), (), (X,))
"""The continuation of a chain that ends with `B`."""
A, B, C = at(1, 0, 4), at(1, 4, 6), at(3, 0, 5)


def chain(*objects: ObjectAt, first: Place = FIRST, fields: tuple[Field, ...] = (X,)) -> Chain:
    """Return a chain that ends with the last object."""
    return Chain(first, max([first, *(each.end for each in objects)]), objects, fields)


def seen(version: int, *objects: ObjectAt, position: Place | None = None) -> TableSeen:
    """Return a table that ends with the last object."""
    files = TableFiles.of(map(as_file, objects))
    return TableSeen(version, version, position or objects[-1].end, "of dlog", (X,), files)


class Run:
    """A machine that is checked after each event."""

    def __init__(
        self,
        known: Followed | None = None,
        checkpoint_every: int = 100,
        *,
        compared: Place | None = None,
        compare_max: int = 100,
    ) -> None:
        self.machine = TableCommits(
            "c/l",
            DELTA,
            checkpoint_every=checkpoint_every,
            known=known,
            compared=FIRST if known is None and compared is None else compared,
            compare_max=compare_max,
        )

    def handle(self, event: Event) -> Effect:
        """Feed an event."""
        effect = self.machine.handle(event)
        self.machine.validate()
        return effect

    def refused(self, event: Event) -> DLError:
        """Feed an event that ends it with an error."""
        error = refused(self.handle(event))
        assert self.machine.state is TableState.FAILED
        assert self.machine.followed is None
        return error

    def looked(self, table: TableSeen) -> Effect:
        """Begin, and show the table."""
        assert self.handle(Signal.BEGIN) == Look()
        return self.handle(Looked(table))


def test_a_table_is_made_with_the_first_objects_and_looked_at() -> None:
    """Its position is the end of the last one; nothing more is done while nothing is new."""
    run = Run()
    assert run.handle(Signal.BEGIN) == Look()
    assert run.handle(Signal.NO_TABLE) == ReadChain(FIRST)
    assert run.handle(ChainRead(chain(A, B))) == Create((X,), (A, B), (1, 6))
    assert run.handle(Signal.DONE) == Look()
    assert run.handle(Looked(seen(0, A, B))) == ReadChain(FIRST)
    assert run.handle(ChainRead(chain(A, B))) == Ended(True)
    followed = Followed((1, 6), FIRST, (X,))
    assert run.machine.followed == followed
    again = Run(followed)
    assert again.handle(Signal.BEGIN) == ReadChain((1, 6))
    assert again.handle(ChainRead(SAME)) == Ended(False)
    assert again.machine.followed == followed


def test_a_log_without_cold_records_has_no_table() -> None:
    """None is made before there is a file for it."""
    run = Run()
    run.handle(Signal.BEGIN)
    run.handle(Signal.NO_TABLE)
    assert run.handle(ChainRead(chain())) == Ended(True)
    assert run.machine.followed is None


@pytest.mark.parametrize(
    "changed", [chain(C), chain(first=(1, 4)), chain(fields=(X, Y))], ids=["new", "cut", "wider"]
)
def test_a_table_that_was_seen_is_looked_at_if_something_is_new(changed: Chain) -> None:
    """An object, a truncation, or a column."""
    run = Run(Followed((1, 6), FIRST, (X,)))
    run.handle(Signal.BEGIN)
    assert run.handle(ChainRead(changed)) == Look()
    assert run.handle(Looked(seen(3, A, B))) == ReadChain((1, 6))


def test_new_objects_are_added_and_truncated_ones_removed_in_one_commit() -> None:
    """A file with some records that are not truncated stays."""
    run = Run(Followed((1, 6), FIRST, (X,)))
    run.handle(Signal.BEGIN)
    run.handle(ChainRead(chain(C, first=(1, 5))))
    run.handle(Looked(seen(3, A, B)))
    effect = run.handle(ChainRead(chain(C, first=(1, 5))))
    assert effect == Commit((C,), (as_file(A),), (3, 5))


def test_segments_that_were_truncated_before_they_came_are_passed() -> None:
    """The position moves without a file, so that no commit may add them later."""
    run = Run()
    run.looked(seen(3, A, B))
    effect = run.handle(ChainRead(chain(first=(4, 2))))
    assert effect == Commit((), (as_file(A), as_file(B)), (4, 0))
    run.handle(Signal.DONE)
    run.handle(Looked(TableSeen(4, 4, (4, 0), "", (X,), TableFiles())))
    assert run.handle(ChainRead(chain(first=(4, 2)))) == Ended(True)


def test_a_commit_takes_some_files_and_the_next_ones_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of those that go."""
    monkeypatch.setattr(table_commits, "FILES_PER_COMMIT_MAX", 1)
    run = Run()
    run.handle(Signal.BEGIN)
    run.handle(Signal.NO_TABLE)
    assert run.handle(ChainRead(chain(A, B))) == Create((X,), (A,), (1, 4))
    run.handle(Signal.DONE)
    run.handle(Looked(seen(0, A)))
    assert run.handle(ChainRead(chain(A, B, C))) == Commit((B,), (), (1, 6))
    run.handle(Signal.DONE)
    run.handle(Looked(seen(1, A, B)))
    assert run.handle(ChainRead(chain(C, first=(3, 0)))) == Commit((C,), (as_file(A),), (3, 5))


def test_an_unknown_outcome_is_looked_up_before_anything_is_added() -> None:
    """If the commit was made, nothing is added; else it is tried again, three times at most."""
    run = Run()
    run.looked(seen(0, A))
    assert run.handle(ChainRead(chain(A, B))) == Commit((B,), (), (1, 6))
    assert run.handle(CallFailed(LOST)) == Look()
    assert run.handle(Looked(seen(1, A, B))) == ReadChain((1, 6))
    assert run.handle(ChainRead(SAME)) == Ended(True)

    run = Run()
    run.looked(seen(0, A))
    for _ in range(ATTEMPTS_MAX - 1):
        assert run.handle(ChainRead(chain(A, B))) == Commit((B,), (), (1, 6))
        assert run.handle(CallFailed(LOST)) == Look()
        run.handle(Looked(seen(0, A)))
    run.handle(ChainRead(chain(A, B)))
    assert run.refused(CallFailed(LOST)) is LOST


def test_errors_that_are_not_of_the_store_end_it_at_once() -> None:
    """Failures of looks do the same."""
    run = Run()
    run.looked(seen(0, A))
    run.handle(ChainRead(chain(A, B)))
    damage = CorruptMetadataError("another object")
    assert run.refused(CallFailed(damage)) is damage
    run = Run()
    run.handle(Signal.BEGIN)
    assert run.refused(CallFailed(LOST)) is LOST


def test_a_store_that_shows_an_older_version_is_not_believed() -> None:
    """Nothing is added by what it shows."""
    run = Run()
    run.looked(seen(0, A))
    run.handle(ChainRead(chain(A, B)))
    assert run.handle(Signal.DONE) == Look()
    assert "older" in str(run.refused(Looked(seen(0, A))))


def test_a_table_of_another_log_is_refused() -> None:
    """It has no position of this one."""
    run = Run()
    run.handle(Signal.BEGIN)
    error = run.refused(Looked(TableSeen(5, 5, None, "sales of 2025", (X,), TableFiles())))
    assert isinstance(error, TableError)
    assert "sales of 2025" in str(error)


@pytest.mark.parametrize(
    ("table", "found", "said"),
    [
        (seen(1, A, B), chain(A), "is ahead of the log"),
        (seen(1, A, C), chain(A, B), "is ahead of the log"),
        (seen(1, A, position=(1, 2)), chain(A), "some before that and some after"),
        (seen(1, position=(1, 2)), chain(A), "some before that and some after"),
        (seen(1, A, B, position=(3, 5)), chain(A, C), "the table and the log differ"),
        (seen(1, A, position=(1, 6)), chain(A, B), "the table and the log differ"),
    ],
    ids=["fewer", "none", "beyond", "cut", "other", "lacking"],
)
def test_a_table_that_does_not_fit_is_refused(table: TableSeen, found: Chain, said: str) -> None:
    """The error names positions or files, and says what to do."""
    run = Run()
    run.looked(table)
    error = run.refused(ChainRead(found))
    assert isinstance(error, TableError)
    assert said in str(error)
    assert "to do: " in str(error)


def test_objects_with_the_same_records_take_the_place_of_others() -> None:
    """As those that a scrub wrote again: the position stays."""
    new = at(1, 0, 4, name="1/9-u-0-1.parquet")
    run = Run()
    run.looked(seen(1, A, B))
    effect = run.handle(ChainRead(chain(new, B, C)))
    assert effect == Commit((new,), (as_file(A),), (1, 6), is_same=True)
    run.handle(Signal.DONE)
    assert run.handle(Looked(seen(2, new, B))) == ReadChain(FIRST)  # it is compared again
    assert run.handle(ChainRead(chain(new, B, C))) == Commit((C,), (), (3, 5))


def test_other_objects_are_named_until_the_table_has_them() -> None:
    """A lost commit is made again in the same run; a table that does not take them is refused."""
    new = at(1, 0, 4, name="1/9-u-0-1.parquet")
    commit = Commit((new,), (as_file(A),), (1, 6), is_same=True)
    run = Run()
    run.looked(seen(1, A, B))
    assert run.handle(ChainRead(chain(new, B))) == commit
    assert run.handle(CallFailed(LOST)) == Look()
    assert run.handle(Looked(seen(1, A, B))) == ReadChain(FIRST)
    assert run.handle(ChainRead(chain(new, B))) == commit
    run.handle(Signal.DONE)
    run.handle(Looked(seen(2, A, B)))
    error = run.refused(ChainRead(chain(new, B)))
    assert isinstance(error, TableError)
    assert "does not take 1/9-u-0-1.parquet" in str(error)
    assert run.machine.compared == FIRST


MANY = [at(lssn, 0, 2) for lssn in range(1, 10)]


def part(*numbers: int, first: Place = FIRST, goes_on: bool = True) -> Chain:
    """Return a part of a chain of segments with an object each."""
    found = replace(chain(*(MANY[each - 1] for each in numbers)), first=first)
    return replace(found, end=max(first, found.end), goes_on=goes_on)


def test_files_are_compared_part_by_part_and_some_in_each_run() -> None:
    """One part of a log of any size is in memory; each run adds new files."""
    table = seen(1, *MANY[:8])
    run = Run(compare_max=4)
    assert run.looked(table) == ReadChain(FIRST)
    assert run.handle(ChainRead(part(1, 2))) == ReadChain((2, 2))
    assert run.handle(ChainRead(part(3, 4))) == ReadChain((8, 2))
    assert run.handle(ChainRead(part(9, goes_on=False))) == Commit((MANY[8],), (), (9, 2))
    run.handle(Signal.DONE)
    assert run.handle(Looked(seen(2, *MANY))) == ReadChain((9, 2))
    assert run.handle(ChainRead(replace(SAME, end=(9, 2)))) == Ended(True)
    assert run.machine.compared == (4, 2)
    known = run.machine.followed
    assert known is not None
    # The next run goes on from there, also over what was truncated meanwhile.
    run = Run(known, compared=run.machine.compared, compare_max=4)
    assert run.looked(seen(2, *MANY)) == ReadChain((4, 2))
    left = part(6, 7, first=(6, 0))
    assert run.handle(ChainRead(left)) == ReadChain((7, 2))
    left = part(8, 9, first=(6, 0), goes_on=False)
    assert run.handle(ChainRead(left)) == Commit((), tuple(map(as_file, MANY[:5])), (9, 2))
    assert run.machine.compared is None


@pytest.mark.parametrize(
    ("table", "second", "said"),
    [
        (seen(1, *MANY[:2], *MANY[3:8]), part(3, 4), "differ in 3/7-t-0-1.parquet"),
        (seen(1, *MANY[:8]), part(4), "differ in 3/7-t-0-1.parquet"),
        (seen(1, *MANY[:8]), part(3, 4, goes_on=False), "is ahead of the log"),
    ],
    ids=["lacking", "other", "ahead"],
)
def test_a_later_part_that_differs(table: TableSeen, second: Chain, said: str) -> None:
    """The table is refused, and what was compared before stays so."""
    run = Run()
    run.looked(table)
    assert run.handle(ChainRead(part(1, 2))) == ReadChain((2, 2))
    assert said in str(run.refused(ChainRead(second)))
    assert run.machine.compared == (2, 2)


def test_a_comparison_goes_on_after_the_store_failed() -> None:
    """Without what was seen of the table before."""
    run = Run(compared=(2, 2))
    assert run.looked(seen(1, *MANY[:8])) == ReadChain((2, 2))
    assert run.handle(ChainRead(part(3, 4))) == ReadChain((4, 2))
    assert run.refused(CallFailed(LOST)) is LOST
    assert run.machine.compared == (4, 2)


def test_columns_are_added_before_files_that_have_them() -> None:
    """A table that does not take them is refused."""
    run = Run()
    run.looked(seen(1, A))
    wider = chain(A, B, fields=(X, Y))
    assert run.handle(ChainRead(wider)) == AddFields((Y,), (1, 4))
    run.handle(Signal.DONE)
    run.handle(Looked(seen(2, A)))
    assert isinstance(run.refused(ChainRead(wider)), TableError)
    run = Run()
    run.looked(seen(1, A))
    run.handle(ChainRead(wider))
    run.handle(Signal.DONE)
    run.handle(Looked(TableSeen(2, 2, (1, 4), "", (X, Y), TableFiles.of([as_file(A)]))))
    assert run.handle(ChainRead(wider)) == Commit((B,), (), (1, 6))


def test_a_column_of_another_type_is_refused() -> None:
    """Delta does not change it."""
    run = Run()
    run.looked(seen(1, A))
    error = run.refused(ChainRead(chain(A, fields=({**X, "type": "double"},))))
    assert isinstance(error, UnsupportedError)


def test_checkpoints_are_made_of_some_versions() -> None:
    """If one fails, commits go on, and it is reported at the end; a new process tries again."""
    run = Run(checkpoint_every=2)
    assert run.looked(seen(2, A)) == Tidy()
    assert run.handle(Signal.DONE) == ReadChain(FIRST)
    run.handle(ChainRead(chain(A, B)))
    run.handle(Signal.DONE)
    assert run.handle(Looked(seen(3, A, B))) == ReadChain((1, 6))
    run = Run(checkpoint_every=2)
    assert run.looked(seen(2, A)) == Tidy()
    assert run.handle(CallFailed(LOST)) == ReadChain(FIRST)
    assert run.handle(ChainRead(chain(A, B))) == Commit((B,), (), (1, 6))
    run.handle(Signal.DONE)
    run.handle(Looked(seen(3, A, B)))
    assert run.refused(ChainRead(SAME)) is LOST


@dataclass
class Store:
    """A table in a store that loses requests and answers, delays requests, and shows old ones."""

    rng: random.Random
    versions: list[TableSeen] = field(default_factory=list)
    late: list[tuple[int, TableSeen]] = field(default_factory=list)

    def put(self, base: int, after: TableSeen) -> bool:
        """Make a commit on a version; return False if another one came after that."""
        if base != len(self.versions) - 1:
            return False
        self.versions.append(after)
        return True

    def deliver(self) -> None:
        """Deliver requests that were late."""
        for base, after in self.late:
            self.put(base, after)
        self.late = []


class World:
    """A log that grows and is truncated, its table, and two workers that believe to be alone."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = Store(self.rng)
        self.objects: list[ObjectAt] = []
        self.replaced = 0
        self.first: Place = FIRST
        self.fields: tuple[Field, ...] = (X,)
        self.swept: set[str] = set()

    def change(self) -> None:
        """Let the log tier, truncate, or widen its schema; and let the sweep delete objects."""
        what = self.rng.random()
        last = self.objects[-1].end if self.objects else FIRST
        if what < 0.5:
            lssn, start = (last[0] + 1, 0) if self.rng.random() < 0.5 else last
            self.objects.append(at(lssn, start, start + self.rng.randint(1, 3)))
        elif what < 0.65 and self.objects:
            found = self.rng.choice(self.objects)
            self.first = max(self.first, (found.end[0], found.end[1] - self.rng.randint(0, 1)))
        elif what < 0.7:
            self.fields = (X, Y)
        elif what < 0.8 and self.objects:  # a scrub writes an object again
            number = self.rng.randrange(len(self.objects))
            found = self.objects[number]
            self.replaced += 1
            name = f"{found.start[0]}/{100 + self.replaced}-u-{found.start[1]}-1.parquet"
            self.objects[number] = replace(found, name=name)
        self.sweep()

    def sweep(self) -> None:
        """Delete objects that are truncated, as `table_guard` lets the sweep do."""
        table = self.store.versions[-1] if self.store.versions else None
        for each in self.objects:
            is_young = "-u-" in each.name  # a sweep leaves what is not a day old
            if each.end > self.first or is_young:
                continue
            named = table is not None and each.name in {file.name for file in table.files}
            if table is None or (table.position or FIRST)[0] <= each.start[0] or named:
                continue
            self.swept.add(each.name)

    def chain_from(self, start: Place) -> Chain:
        """Return what the driver reads."""
        begin = max(start, self.first)
        held = [each for each in self.objects if each.end > begin]
        end = max([self.first, *(each.end for each in self.objects)])
        goes_on = len(held) > 2
        if goes_on:  # after two objects, and the rest of a segment
            held = [each for each in held if each.end[0] <= held[1].end[0]]
            end = max(self.first, held[-1].end)
        return Chain(self.first, end, tuple(held), self.fields, goes_on=goes_on)

    def answer(self, effect: Effect, looked: list[int]) -> Event:
        """Perform an effect on the store, which may lie."""
        versions = self.store.versions
        match effect:
            case Look():
                if self.rng.random() < 0.1:
                    return CallFailed(LOST)
                looked[0] = len(versions) - 1
                return Looked(versions[-1]) if versions else Signal.NO_TABLE
            case ReadChain(start):
                return ChainRead(self.chain_from(start))
            case Tidy():
                return Signal.DONE if self.rng.random() < 0.5 else CallFailed(LOST)
            case Create() | AddFields() | Commit():
                after = self.after(effect, looked[0])
            case _:
                raise AssertionError(effect)
        fate = self.rng.random()
        if fate < 0.15:
            return CallFailed(LOST)
        if fate < 0.3:
            self.store.late.append((looked[0], after))
            return CallFailed(LOST)
        if not self.store.put(looked[0], after) or fate < 0.45:
            return CallFailed(LOST)
        return Signal.DONE

    def after(self, effect: Create | AddFields | Commit, base: int) -> TableSeen:
        """Return the version that an effect makes of an older one."""
        if isinstance(effect, Create):
            files = TableFiles.of(map(as_file, effect.adds))
            return TableSeen(0, 0, effect.position, "", effect.fields, files)
        old = self.store.versions[base]
        if isinstance(effect, AddFields):
            wider = (*old.fields, *effect.fields)
            return old._replace(version=base + 1, position=effect.position, fields=wider)
        names = {each.name for each in effect.removes}
        kept = [each for each in old.files if each.name not in names]
        files = TableFiles.of([*kept, *map(as_file, effect.adds)])
        return old._replace(version=base + 1, position=effect.position, files=files)

    def check(self) -> None:
        """Each version has each file once, in order, without a gap, and none that is deleted."""
        held = {each.end: each for each in self.objects}
        for table in self.store.versions[-2:]:
            ends = [each.end for each in table.files]
            assert len(ends) == len(set(ends))
            assert table.position is not None
            expected = [each.end for each in self.objects if each.end <= table.position]
            begun = expected.index(ends[0]) if ends else len(expected)
            assert ends == expected[begun:]
            missed = [held[end] for end in expected[:begun]]
            assert all(each.end <= self.first for each in missed)
        if self.store.versions:
            assert not {each.name for each in self.store.versions[-1].files} & self.swept


def test_a_checkpoint_of_many_files_is_made_less_often() -> None:
    """One has all files: a commit's share of its cost is the same in a table of any size."""
    objects = [at(lssn, 0, 1) for lssn in range(1, 4_001)]

    def effect_at(version: int, checkpoint: int, count: int) -> Effect:
        table = seen(version, *objects[:count])._replace(checkpoint=checkpoint)
        return Run(checkpoint_every=3).looked(table)

    assert effect_at(3, 0, 10) == Tidy()
    assert effect_at(4, 1, 10) == Tidy()
    assert effect_at(9, 7, 10) == ReadChain(FIRST)
    assert effect_at(0, -10, 10) == ReadChain(FIRST)
    assert effect_at(10, 7, 3_999) == Tidy()
    assert effect_at(10, 7, 4_000) == ReadChain(FIRST)
    assert effect_at(12, 7, 4_000) == Tidy()


@for_each(range(amount(3_000, sampled=150)))
def test_workers_that_die_and_a_store_that_lies(seed: int) -> None:
    """However they meet, a file is added once; in the end the table has what the log has."""
    world = World(seed)
    workers: list[tuple[TableCommits, Effect, list[int]] | None] = [None, None]
    known: list[Followed | None] = [None, None]
    compared: list[Place | None] = [None, None]
    for _ in range(120):
        number = world.rng.randrange(2)
        worker = workers[number]
        if world.rng.random() < 0.15:
            world.change()
        if world.rng.random() < 0.1:
            world.store.deliver()
        if worker is None or world.rng.random() < 0.05:  # begin, or die and begin again
            if worker is not None:
                known[number] = compared[number] = None
            machine = Run(known[number], 3, compared=compared[number], compare_max=4).machine
            workers[number] = machine, machine.handle(Signal.BEGIN), [-1]
            continue
        machine, effect, looked = worker
        effect = machine.handle(world.answer(effect, looked))
        machine.validate()
        workers[number] = machine, effect, looked
        if isinstance(effect, Ended):
            assert effect.outcome in (True, False, LOST) or "older than" in str(effect.outcome)
            known[number], compared[number] = machine.followed, machine.compared
            workers[number] = None
        world.check()
    world.store.deliver()
    world.rng = random.Random(seed)
    outcome: object = None
    for _ in range(100):
        machine = Run(None, 3).machine
        effect, looked = machine.handle(Signal.BEGIN), [-1]
        while not isinstance(effect, Ended):
            effect = machine.handle(world.answer(effect, looked))
        world.check()
        outcome = effect.outcome
        if outcome is True:
            break
    assert outcome is True
    live = [each.name for each in world.objects if each.end > world.first]
    table = [each.name for each in (world.store.versions or [seen(0, A)])[-1].files]
    assert table == live or not world.store.versions
