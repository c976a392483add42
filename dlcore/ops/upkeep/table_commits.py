"""Commits to the table of a log: it follows the cold part of the log's chain, exactly once.

Theory of operation.  The table's position is the place in the log up to which it has all cold
records, and is set by the same commit that adds the files.  Each step is therefore the same: look
at the table, read what the chain has after the position, and make one commit for the difference.
A commit whose outcome is unknown is no case of its own: the next look shows whether it was made,
and nothing is added before that look.  The library, or the catalog, refuses a commit if another one
came after the table that was seen; hence two workers, or a late request, never add a file twice.
docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

Promises:

* A file is added once, in the order of the log, without a gap.
* A table that is ahead of the log, of another log, or changed by another program is refused: it
  stays as it is.
* Files with truncated records only are removed.  Their objects are deleted later, by a sweep that
  leaves what a table names (`table_guard.py`).
* After the first look in a process, and now and then, all files are compared with the chain: part
  by part, some in each run, so that neither memory nor a run grows with the log.

The driver is `table_keeper.py`.  Each event has one effect.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from dlcore.base.errors import DLError, ObjectStoreError, TableError
from dlcore.base.machines import CallFailed, Ended, State, StepMachine, Transitions
from dlcore.log.cold.table_format import (
    Field,
    Place,
    TableFile,
    TableForm,
    TableSeen,
    boundary_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ATTEMPTS_MAX = 3
"""How often a commit is tried until the log waits for the next round."""
FILES_PER_COMMIT_MAX = 1_000
COMPARED_PER_RUN_MAX = 10_000
"""Files that are compared until the log waits for the next round, and some of one segment more."""
CHECKPOINTED_PER_COMMIT_MAX = 1_000
"""Files that are written into checkpoints for each commit, on average."""


class TableState(State):
    """The state of the machine; FOLLOWED and FAILED are final."""

    READY = "nothing has begun"
    ASKING = "the chain is read: is there anything that the table lacked when it was seen last?"
    LOOKING = "the table is looked at"
    COMPARING = "a part of the chain is read, and compared with the table's files"
    READING = "the chain is read from the table's position on"
    CHANGING = "a commit is being made"
    TIDYING = "a checkpoint is being made, or old versions are deleted"
    FOLLOWED = "the table has what is cold"
    FAILED = "the table is refused, or a store did not do its part"


_S = TableState
TRANSITIONS = Transitions(
    _S.READY,
    {
        _S.READY: {_S.ASKING: "it was seen before", _S.LOOKING: "it was not"},
        _S.ASKING: {
            _S.LOOKING: "something is new",
            _S.FOLLOWED: "nothing is new",
            _S.FAILED: "refused",
        },
        _S.LOOKING: {
            _S.COMPARING: "it is this log's, and a part was not compared lately",
            _S.READING: "all was compared, or enough in this run; or there is no table",
            _S.TIDYING: "a checkpoint is due",
            _S.FAILED: "another log's, or no log's; or refused",
        },
        _S.COMPARING: {
            _S.COMPARING: "the part is the same, and there is a next one",
            _S.CHANGING: "it lacks columns, or has other objects with the same records",
            _S.READING: "all was compared, or enough in this run",
            _S.FAILED: "the table is ahead, or differs; or refused; or a checkpoint failed",
        },
        _S.READING: {
            _S.CHANGING: "there is a difference",
            _S.FOLLOWED: "there is none",
            _S.FAILED: "the table is ahead, or differs; or refused; or a checkpoint failed",
        },
        _S.CHANGING: {
            _S.LOOKING: "made; or its outcome is unknown",
            _S.FAILED: "refused, or too many attempts",
        },
        _S.TIDYING: {
            _S.COMPARING: "made, or left for later; a part was not compared lately",
            _S.READING: "made, or left for later",
            _S.FAILED: "refused",
        },
        _S.FOLLOWED: {},
        _S.FAILED: {},
    },
)


@dataclass(frozen=True, slots=True)
class ObjectAt:
    """An object of the chain: its name in the folder of the log, and its entries."""

    name: str
    size_bytes: int
    start: Place
    end: Place
    records: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A part of the cold part of a log, from some place on, without gaps, and where that ends.

    `first` is the first place of the log that is not truncated, `end` the one after the last cold
    entry that was read.  If the cold part goes on, that is the end of a segment, and `objects` are
    as many as one commit takes, and some of one segment more.  Objects with truncated records only
    are not among them.
    """

    first: Place
    end: Place
    objects: tuple[ObjectAt, ...]
    fields: tuple[Field, ...]
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Followed:
    """A table that was seen to have what is cold: its position, and what it was compared with."""

    position: Place
    first: Place
    fields: tuple[Field, ...]


class Signal(enum.Enum):
    """Events that carry nothing."""

    BEGIN = "the log has a table, and it is this worker's turn"
    NO_TABLE = "there is no table in the folder"
    DONE = "the last effect is done"


@dataclass(frozen=True, slots=True)
class Looked:
    """Event: the newest version of the table."""

    seen: TableSeen


@dataclass(frozen=True, slots=True)
class ChainRead:
    """Event: what `ReadChain` asked for."""

    chain: Chain


Event: TypeAlias = Signal | Looked | ChainRead | CallFailed


@dataclass(frozen=True, slots=True)
class Look:
    """Effect: read the newest version of the table; answer with `Looked` or `NO_TABLE`."""


@dataclass(frozen=True, slots=True)
class ReadChain:
    """Effect: read a part of the cold part, from the place on; answer with `ChainRead`."""

    start: Place


@dataclass(frozen=True, slots=True)
class Create:
    """Effect: make the table with these files; answer with `DONE`."""

    fields: tuple[Field, ...]
    adds: tuple[ObjectAt, ...]
    position: Place


@dataclass(frozen=True, slots=True)
class AddFields:
    """Effect: add columns to the table that was seen; answer with `DONE`."""

    fields: tuple[Field, ...]
    position: Place


@dataclass(frozen=True, slots=True)
class Commit:
    """Effect: change the files of the table that was seen, and its position; answer with `DONE`.

    With `is_same` the files that are added have the rows of those that are removed.
    """

    adds: tuple[ObjectAt, ...]
    removes: tuple[TableFile, ...]
    position: Place
    is_same: bool = False


@dataclass(frozen=True, slots=True)
class Tidy:
    """Effect: make a checkpoint, and delete versions that are too old; answer with `DONE`."""


Work: TypeAlias = Look | ReadChain | Create | AddFields | Commit | Tidy
Effect: TypeAlias = Work | Ended[bool]
"""The outcome is whether the table was looked at."""

BEGINNING: Place = (1, 0)


class _Checkpoints:
    """When a checkpoint is made, and the error of one that was not, for the end of the run."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._tried = -1  # the version for which one was made, or tried
        self.late: DLError | None = None

    def is_due(self, seen: TableSeen) -> bool:
        if seen.version in (0, self._tried):
            return False
        if seen.checkpoint is None:
            return seen.version % self._every == 0
        # One has all files: its share in a commit's cost does not grow with the table.
        every = max(self._every, len(seen.files) // CHECKPOINTED_PER_COMMIT_MAX)
        return seen.version - seen.checkpoint >= every

    def begin(self, version: int) -> None:
        self._tried = version

    def failed(self, error: DLError) -> None:
        """Keep the error: commits go on without the checkpoint."""
        self.late = error

    def require_made(self) -> None:
        """Raise the error of the last one that failed."""
        if self.late is not None:
            raise self.late


class _Comparison:
    """The comparison of all files with the chain, of which a run does a share."""

    def __init__(self, reached: Place | None, files_max: int) -> None:
        self.reached = reached
        """Up to where files were compared; None: all were."""
        self._files_left = files_max

    def next_part(self) -> Place | None:
        """Return where the next part begins; None if this run does no more."""
        return self.reached if self._files_left > 0 else None

    def compared(self, files: int, reached: Place | None) -> None:
        self._files_left -= files
        self.reached = reached


class _Changes:
    """The commits of a run, one after the other: what they did, and how often one was tried."""

    def __init__(self) -> None:
        self.attempts = 0
        self._adds_version = False
        self._made_after = -2  # the version that was seen before the last commit that was made
        self._fields: tuple[Field, ...] = ()
        self._replacing: Commit | None = None

    def begin(self, effect: Create | AddFields | Commit) -> None:
        """Note a commit that is being made.

        Raises:
            TableError: it was made before, and the table is as if it had not been.
        """
        match effect:
            case AddFields(fields):
                if fields == self._fields:
                    raise TableError(f"the table does not take the columns {list(fields)}")
                self._fields = fields
            case Commit(adds, is_same=True):
                if effect == self._replacing:
                    raise TableError(f"the table does not take {adds[0].name} and others")
                self._replacing = effect
        # In Iceberg a change of columns makes no version that the next look could miss.
        self._adds_version = not isinstance(effect, AddFields)

    def made(self, seen: TableSeen | None) -> None:
        """Note that the commit after this version was made."""
        self.attempts = 0
        if self._adds_version:
            self._made_after = -1 if seen is None else seen.version

    def failed(self) -> None:
        """Note that a commit was refused, or that its outcome is unknown: it may be made again."""
        # The outcome is unknown, so the same commit may rightly be planned again.
        self._fields, self._replacing = (), None
        self.attempts += 1

    def require_newer(self, seen: TableSeen) -> None:
        """Raise if a version is older than what was committed."""
        if seen.version <= self._made_after:
            raise ObjectStoreError(
                f"the store shows version {seen.version} of the table, which is older than the "
                "last commit"
            )


class TableCommits(StepMachine[TableState, Event, Work, bool]):
    """Lets a table follow its log, once.

    Args:
        app_id: the log, as its table names it.
        form: the format of the table.
        checkpoint_every: after so many commits a checkpoint is made, or old versions deleted.
        known: the table as it was seen last; None: it is looked at.
        compared: up to where its files were compared, if not all were lately.
        compare_max: how many are compared in this run.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        app_id: str,
        form: TableForm,
        *,
        checkpoint_every: int,
        known: Followed | None,
        compared: Place | None,
        compare_max: int = COMPARED_PER_RUN_MAX,
    ) -> None:
        self.state = TableState.READY
        self._app_id = app_id
        self._form = form
        self._known = known
        self._table: TableSeen | None = None
        self._chain: Chain | None = None
        self._position: Place | None = None  # of the table at the end, or of the next commit
        self._checkpoints = _Checkpoints(checkpoint_every)
        self._comparison = _Comparison(compared, compare_max)
        self._changes = _Changes()

    @property
    def compared(self) -> Place | None:
        """Up to where files were compared; None: all were."""
        return self._comparison.reached

    @property
    def followed(self) -> Followed | None:
        """The table at the end; None if it has no file yet, or was refused."""
        chain = self._chain
        if self.state is not TableState.FOLLOWED or chain is None or self._position is None:
            return None
        return Followed(self._position, chain.first, chain.fields)

    def handle(self, event: Event) -> Effect:
        """Take one event."""
        try:
            match event:
                case Signal.BEGIN:
                    return self._begin()
                case Signal.NO_TABLE:
                    self._table = None
                    return self._read()
                case Looked(seen):
                    return self._looked(seen)
                case ChainRead(chain):
                    is_asking = self.state is TableState.ASKING
                    return self._asked(chain) if is_asking else self._decide(chain)
                case Signal.DONE:
                    return self._done()
                case CallFailed(error):
                    return self._failed(error)
                case _:
                    assert_never(event)
        except DLError as error:
            self._become(TableState.FAILED)
            return Ended(error)

    def _begin(self) -> Effect:
        if self._known is None or self.compared is not None:
            return self._look()
        self._become(TableState.ASKING)
        return ReadChain(self._known.position)

    def _asked(self, chain: Chain) -> Effect:
        known = self._known
        assert known is not None
        if Followed(known.position, chain.first, chain.fields) != known or chain.objects:
            return self._look()
        self._chain, self._position = chain, known.position
        self._become(TableState.FOLLOWED)
        return Ended(False)

    def _look(self) -> Effect:
        self._become(TableState.LOOKING)
        return Look()

    def _looked(self, seen: TableSeen) -> Effect:
        if seen.position is None:
            raise TableError(
                f"the table in the folder of log {self._app_id} is described as "
                f"{seen.description[:200]!r} and has no position of this log: it is of another "
                f"log, or not made by dlog; to do: {self._form.away}, or unset the setting `table`"
            )
        self._changes.require_newer(seen)
        self._table = seen
        if self._checkpoints.is_due(seen):
            return self._tidy(seen.version)
        return self._read()

    def _tidy(self, version: int) -> Effect:
        self._checkpoints.begin(version)
        self._become(TableState.TIDYING)
        return Tidy()

    def _read(self) -> Effect:
        position = None if self._table is None else self._table.position
        part = self._comparison.next_part()
        if position is not None and part is not None:
            self._become(TableState.COMPARING)
            return ReadChain(part)
        self._become(TableState.READING)
        return ReadChain(position or BEGINNING)

    # The difference

    def _decide(self, chain: Chain) -> Effect:
        self._chain = chain
        table = self._table
        if table is None:
            adds = chain.objects[:FILES_PER_COMMIT_MAX]
            if not adds:
                return self._end()
            return self._change(Create(chain.fields, adds, adds[-1].end))
        position = table.position
        assert position is not None
        self._require_fit(table, position, chain)
        missing = self._form.missing_fields(table.fields, chain.fields)
        if missing:
            return self._change(AddFields(tuple(missing), position))
        if self.state is TableState.COMPARING:
            return self._compare(table, position, chain)
        return self._advance(table, position, chain)

    def _compare(self, table: TableSeen, position: Place, chain: Chain) -> Effect:
        """Compare the part with the table's files there, then go on to the next one."""
        assert self.compared is not None
        until = min(position, chain.end) if chain.goes_on else position
        replaced = self._replaced(table, self.compared, until, chain)
        if replaced is not None:
            return self._change(replaced)  # then the part is compared again
        self._comparison.compared(len(chain.objects), None if until == position else until)
        if chain.goes_on:
            return self._read()
        self._become(TableState.READING)
        return self._advance(table, position, chain)  # it was read from there on, too

    def _change(self, effect: Create | AddFields | Commit) -> Effect:
        self._changes.begin(effect)
        self._position = effect.position
        self._become(TableState.CHANGING)
        return effect

    def _advance(self, table: TableSeen, position: Place, chain: Chain) -> Effect:
        new = tuple(each for each in chain.objects if each.start >= position)
        adds = new[:FILES_PER_COMMIT_MAX]
        removes = tuple(itertools.islice(table.files.ended_by(chain.first), FILES_PER_COMMIT_MAX))
        # Also over segments that were truncated before they came into the table: the sweep
        # deletes no object that the table may still add.
        reached = max(position, (chain.first[0], 0), *(each.end for each in adds[-1:]))
        if reached == position and not removes:
            self._position = position
            return self._end()
        return self._change(Commit(adds, removes, reached))

    def _require_fit(self, table: TableSeen, position: Place, chain: Chain) -> None:
        """Raise `TableError` if the table is not one that followed this chain."""
        if not chain.goes_on and position > max(chain.first, chain.end):
            raise TableError(
                f"the table has records up to {boundary_of(position)}, and the log's cold records "
                f"end at {boundary_of(max(chain.first, chain.end))}: the table is ahead of the "
                "log, as after an import of older metadata; to do: keep what only the table has "
                f"elsewhere, then {self._form.remake}, and it is made again"
            )
        beyond = table.files.beyond(position)
        cut = next((each for each in chain.objects if each.start < position < each.end), None)
        if beyond is not None or cut is not None:
            name = cut.name if cut is not None else beyond.name if beyond is not None else ""
            raise TableError(
                f"the table has records up to {boundary_of(position)}, and {name} has some before "
                "that and some after it: another program changed the table, or it is of another "
                f"chain; to do: {self._form.remake}, and it is made again"
            )

    def _replaced(
        self, table: TableSeen, start: Place, until: Place, chain: Chain
    ) -> Commit | None:
        """Return the commit that puts objects in the place of those that had the same records.

        Only those are compared that end after `start`, at `until` or before.

        Raises:
            TableError: the table lacks objects, or has others.
        """
        start = max(start, chain.first)
        files = {each.name: each for each in table.files.ended_by(until, after=start)}
        objects = {each.name: each for each in chain.objects if start < each.end <= until}
        adds = [each for name, each in objects.items() if name not in files]
        removes = [each for name, each in files.items() if name not in objects]
        if not adds and not removes:
            return None
        if _rows_by_segment(adds) != _rows_by_segment(removes):
            names = [*(each.name for each in adds), *(each.name for each in removes)]
            raise TableError(
                f"the table and the log differ in {', '.join(names[:3])}: another program changed "
                f"the table; to do: {self._form.remake}, and it is made again"
            )
        assert table.position is not None
        return Commit(tuple(adds), tuple(removes), table.position, is_same=True)

    # Outcomes

    def _done(self) -> Effect:
        if self.state is TableState.TIDYING:
            return self._read()
        self._changes.made(self._table)
        return self._look()

    def _end(self) -> Effect:
        self._checkpoints.require_made()
        self._become(TableState.FOLLOWED)
        return Ended(True)

    def _failed(self, error: DLError) -> Effect:
        if not isinstance(error, ObjectStoreError):
            raise error
        if self.state is TableState.TIDYING:
            self._checkpoints.failed(error)
            return self._read()
        self._changes.failed()
        if self.state is not TableState.CHANGING or self._changes.attempts == ATTEMPTS_MAX:
            raise error
        return self._look()

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert self._changes.attempts <= ATTEMPTS_MAX
        if self.state is TableState.CHANGING:
            before = BEGINNING if self._table is None else self._table.position
            assert before is not None
            assert self._position is not None
            assert self._position >= before
        if self.state is TableState.FOLLOWED:
            assert self._checkpoints.late is None
        if self.compared is None:
            assert self.state is not TableState.COMPARING


def _rows_by_segment(files: Sequence[ObjectAt | TableFile]) -> dict[int, int]:
    rows: dict[int, int] = {}
    for each in files:
        rows[each.end[0]] = rows.get(each.end[0], 0) + each.records
    return rows
