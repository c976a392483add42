"""Atomic appends beside a log's owner: every interleaving in a small scope.

The machines are the real ones: `Commit` for each append, and `Turns` for the owner.  The owner's
writer is modelled by what turns ask of it: it opens an extent, writes entries that are durable at
once, closes its extent to pause, and continues from a head.  The metadata store is the real
tree.  A step is: a machine is answered; an answer is lost, and the transaction is applied, applied
later, or never; the owner hears of a change of its lock; a timer ends; the owner or an append's
caller crashes.

Promises, looked at in every state:

* OnceEach: the records of an append are in the log at most once, and once if it was acknowledged.
* OwnersRecordsStay: each entry that the owner acknowledged is in the log.
* NoAppendWaitsForEver: a state in which nothing can happen has no append that waits.

`plan_append` asserts that no append enters beside an open extent.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.config import LogConfig
from dlcore.base.errors import (
    DLError,
    MetadataConnectionError,
    MetadataError,
    WriteError,
)
from dlcore.base.machines import CallFailed, Ended
from dlcore.log.metadata.changes import plan_complete, plan_pause, plan_start
from dlcore.log.metadata.nodes import head_of
from dlcore.log.metadata.segment import Extent, StagedExtent
from dlcore.log.metadata.values import LockHolder, LogHead, LogKey, SegmentEnd, StagedLedger
from dlcore.log.proxied import turns
from dlcore.log.proxied.turns import Turns
from dlcore.log.staging import commit
from dlcore.log.staging.commit import AppendTerms, Commit
from dlcore.metadata.attempts import Store
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.port import Create, Delete, Put, Versioned
from dlcore.metadata.stored import decode, encode
from dlcore.metadata.tree import Tree
from tests.model.parts import freeze

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from dlcore.log.metadata.changes import Change
    from dlcore.log.metadata.values import VersionedHead
    from dlcore.log.reading.scan import CommitResult
    from dlcore.metadata.port import Op

PATHS = NamespacePaths("/dlog")
LOG = LogKey(name="clicks", log_id="log-1")
LOG_PATHS = PATHS.log_of(LOG.log_id)
AWAY = MetadataConnectionError("no answer")
_OWNERS_LEDGER = 100
"""The first of the owner's ledgers; those of appends have lower numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The extent of one search."""

    appends: int = 1
    is_same: bool = False
    """Whether all of them are one append, tried by several processes."""
    writes: int = 2
    """Entries of the owner."""
    losses: int = 1
    """Answers that are lost."""
    crashes: int = 1
    """The names of the owner, and of callers of appends."""
    timeouts: int = 1
    """Turns that end because no one used them in time."""


SMALL = {
    "one append, an answer is lost": Scope(writes=1, crashes=0),
    "one append, a crash": Scope(writes=1, losses=0),
    "one append, tried twice": Scope(appends=2, is_same=True, writes=0, crashes=0, timeouts=0),
    "two appends": Scope(appends=2, writes=0, losses=0, crashes=0),
}
LARGE = {
    "one append, an answer is lost, a crash": Scope(writes=1, timeouts=0),
    "one append, tried twice, a turn runs out": Scope(appends=2, is_same=True, writes=0, crashes=0),
    "two appends, an answer is lost": Scope(appends=2, writes=0, crashes=0, timeouts=0),
}


class Append:
    """An append and its caller, which may crash and be followed by another one."""

    def __init__(self, number: int, *, is_same: bool) -> None:
        name = "job" if is_same else f"job-{number}"
        self.ledger_id = 1 if is_same else 1 + number
        terms = AppendTerms(identity=name, version=1, token=name, staged_as=name)
        self.commit = Commit(PATHS, terms, LogConfig(), "me")
        self.effect: commit.Effect | None = None
        self.is_asked = False  # the locks that it waits for
        self.frozen: Hashable = None  # of the machine and the effect, until one changes

    def key(self) -> Hashable:
        """Return all that a later step may depend on."""
        if self.frozen is None:
            self.frozen = (freeze(self.commit), freeze(self.effect))
        return (self.frozen, self.is_asked)

    @property
    def result(self) -> CommitResult | None:
        """The caller's result."""
        return self.commit.result

    def extent(self) -> StagedExtent:
        """Return what it appends: one record."""
        return StagedExtent(
            ledger_id=self.ledger_id,
            first_entry_id=0,
            last_entry_id=0,
            record_count=1,
            size_bytes=10,
            log=LOG.name,
            log_id=LOG.log_id,
            identity=self.commit.terms.staged_as,
        )


class Owner:
    """The owner's writer, as far as turns know it."""

    def __init__(self, at: VersionedHead) -> None:
        self.turns = Turns(at.head)
        self.at = at
        self.ledger_id: int | None = None  # of its open extent
        self.is_paused = False
        self.is_over = False
        self.call: turns.Call | turns.SetTurn | None = None
        self.timers: tuple[turns.Signal | turns.TurnDue, ...] = ()
        self.heard = -1  # the version of its lock
        self.frozen: Hashable = None  # of the machine, until it changes

    def key(self, lock: tuple[LockHolder, int] | None) -> Hashable:
        """Return all that a later step may depend on."""
        if self.frozen is None:
            self.frozen = freeze(self.turns)
        has_heard = lock is None or lock[1] == self.heard
        writer = (self.at, self.ledger_id, self.is_paused, self.is_over)
        return (self.frozen, writer, self.call, frozenset(self.timers), has_heard)


class World:
    """All of it; a step changes a copy."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.tree = Tree()  # which copies share until one of them applies a transaction
        self._nodes: Hashable = None  # of the tree, as values
        self.appends = [Append(n, is_same=scope.is_same) for n in range(scope.appends)]
        self.ledgers: dict[int, int] = {}  # the owner's: how many entries are acknowledged
        self.late: tuple[tuple[Op, ...], ...] = ()
        self.writes, self.losses, self.crashes = scope.writes, scope.losses, scope.crashes
        self.timeouts = scope.timeouts
        holder = LockHolder(owner="proxy", token="w", turn="free")
        self.put(LOG_PATHS.head, encode(LogHead()))
        self.put(LOG_PATHS.lock, encode(holder))
        for append in self.appends:
            made = StagedLedger(
                ledger_id=append.ledger_id,
                identity=append.commit.terms.staged_as,
                owner="task",
                created_ms=0,
            )
            self.put(PATHS.staged_ledger(append.ledger_id), encode(made))
            self.make_above(PATHS.commit(append.commit.terms.identity))
        self.owner: Owner | None = Owner(self.head())

    # The store

    def make_above(self, path: str) -> None:
        """Create the parents of a node."""
        self.tree.apply([Create(each, b"") for each in self.tree.missing_above(path)], session=1)

    def put(self, path: str, value: bytes) -> None:
        """Store a value, whatever is there."""
        self.make_above(path)
        is_there = self.tree.find(path) is not None
        self.tree.apply([Put(path, value, -1) if is_there else Create(path, value)], session=1)

    def apply(self, ops: Sequence[Op]) -> DLError | None:
        """Apply a transaction; return its error."""
        self.tree, self._nodes = self.tree.copy(), None
        try:
            self.tree.apply(ops, session=1)
        except MetadataError as error:
            return error
        return None

    def read(self, path: str) -> Versioned | None:
        """Return a node."""
        node = self.tree.find(path)
        return None if node is None else node.versioned()

    def head(self) -> VersionedHead:
        """Return the log's head."""
        return head_of(PATHS, LOG, self.read(LOG_PATHS.head))

    def lock(self) -> tuple[LockHolder, int] | None:
        """Return the holder of the lock, and the version of its node."""
        node = self.read(LOG_PATHS.lock)
        if node is None:
            return None
        return decode(LockHolder, node.value, source=LOG_PATHS.lock), node.version

    def copied(self) -> World:
        """Return a copy: what is shared never changes, or is only replaced."""
        world = copy.copy(self)
        world.ledgers = dict(self.ledgers)
        world.appends = [copy.copy(each) for each in self.appends]
        for append in world.appends:
            append.commit = copy.copy(append.commit)
        if self.owner is not None:
            world.owner = copy.copy(self.owner)
            world.owner.turns = copy.copy(self.owner.turns)
        return world

    def key(self) -> Hashable:
        """Return all that a later step may depend on; how many attempts there were does not count.

        The owner forgets the timers of turns that are over, which do nothing.
        """
        if self._nodes is None:
            nodes = self.tree.dump().items()
            self._nodes = frozenset((path, node.value, node.version) for path, node in nodes)
        return (
            self._nodes,
            tuple(each.key() for each in self.appends),
            None if self.owner is None else self.owner.key(self.lock()),
            tuple(self.ledgers.items()),
            frozenset(self.late),
            (self.writes, self.losses, self.crashes, self.timeouts),
        )

    def extents(self) -> list[Extent]:
        """Return the extents in the log."""
        head = self.head().head
        found = [] if head.segment is None else list(head.segment.tail)
        for lssn in range(1, head.max_lssn + 1):
            node = self.read(LOG_PATHS.segment(lssn))
            if node is not None and node.value:
                found += decode(SegmentEnd, node.value, source="").tail
        return found


class Step(NamedTuple):
    """A step, and how it changes a world; it may end in the error of a machine."""

    what: str
    change: Callable[[World], None]


class Model:
    """The steps of one scope; states are hashes of worlds."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._worlds: dict[int, World] = {}  # those that are still to be visited, by their hash
        self._visited: set[int] = set()

    def initial(self) -> int:
        """Return where it begins: an owner that has the lock, and appends that have not begun."""
        return self._state(World(self.scope))

    def _state(self, world: World) -> int:
        state = hash(world.key())
        if state not in self._visited:
            self._worlds.setdefault(state, world)
        return state

    def check(self, state: int) -> str:
        """Return which promise is broken, "" if none is."""
        world = self._worlds[state]
        extents = world.extents()
        for append in world.appends:
            count = sum(each.ledger_id == append.ledger_id for each in extents)
            has_result = append.result is not None
            if count > 1 or (has_result and count != 1):
                return f"OnceEach: {append.commit.terms} is in the log {count} times"
        for ledger_id, count in world.ledgers.items():
            held = [each for each in extents if each.ledger_id == ledger_id]
            ends = [each.last_entry_id for each in held]
            if count and not (None in ends or count - 1 in ends):
                return (
                    f"OwnersRecordsStay: {count} entries of ledger {ledger_id}, {held} in the log"
                )
        is_waiting = any(each.result is None for each in world.appends)
        if is_waiting and not any(True for _ in self._all_steps(world)):
            return "NoAppendWaitsForEver: an append waits, and nothing can happen"
        return ""

    def steps(self, state: int) -> Iterator[tuple[str, int]]:
        """Yield every step, and the state after it."""
        before = self._worlds.pop(state)
        self._visited.add(state)
        for step in self._all_steps(before):
            world = before.copied()
            step.change(world)
            yield step.what, self._state(world)

    def _all_steps(self, world: World) -> Iterator[Step]:
        for number, append in enumerate(world.appends):
            yield from _append_steps(world, number, append)
        for number in range(len(world.late)):
            yield Step(f"late transaction {number} arrives", partial(_arrive, number))
        if world.owner is not None:
            yield from _owner_steps(world, world.owner)


# Appends


def _append_steps(  # noqa: C901 - one case for each kind
    world: World, number: int, append: Append
) -> Iterator[Step]:
    if append.result is not None:
        return
    effect, name = append.effect, f"append {number}"

    def step(what: str, change: Callable[[World, Append], None]) -> Step:
        return Step(f"{name} {what}", lambda w: change(w, w.appends[number]))

    if effect is None:
        yield step("begins", lambda w, a: _feed(a, commit.Begin((a.extent(),), {}, 0.0)))
        return
    if world.crashes:
        yield step("is cancelled", _cancel)
    match effect:
        case commit.Look():
            yield step("looks", _look)
        case commit.AwaitLocks(locks):
            if locks[0].ask is not None and not append.is_asked:
                yield step("asks for a turn", _ask)
            elif world.lock() is None or world.lock()[0] != locks[0].holder:  # type: ignore[index]
                yield step("sees another lock", lambda _, a: _feed(a, commit.Signal.WAIT_OVER))
        case commit.RecoverLog():
            yield step("recovers the log", _recover)
        case Store():
            yield step("stores", _store)
            if world.losses:
                yield step("stores, and the answer is lost", lambda w, a: _lose(w, a, "now"))
                yield step("sends what comes late", lambda w, a: _lose(w, a, "late"))
        case _:
            yield step("pauses", lambda _, a: _feed(a, commit.Signal.PAUSE_OVER))


def _feed(append: Append, event: commit.Event) -> None:
    effect = append.commit.handle(event)
    append.commit.validate()
    append.is_asked, append.frozen = False, None
    append.effect = None if isinstance(effect, Ended) else effect
    assert append.effect is not None or append.result is not None, effect


def _look(world: World, append: Append) -> None:
    assert isinstance(append.effect, commit.Look)
    nodes = [world.read(path) for path in append.effect.paths]
    _feed(append, commit.Looked(nodes, [], 0.0, 0))


def _ask(world: World, append: Append) -> None:
    assert isinstance(append.effect, commit.AwaitLocks)
    (lock,) = append.effect.locks
    assert lock.ask is not None
    append.is_asked = True
    if world.apply([lock.ask]) is not None:
        _feed(append, commit.Signal.WAIT_OVER)


def _recover(world: World, append: Append) -> None:
    assert isinstance(append.effect, commit.RecoverLog)
    extent = world.head().head.open_extent
    known = append.effect.at.head.open_extent
    assert known is not None
    if extent is not None and extent.ledger_id == known.ledger_id:
        closing = _closing(world, known.ledger_id)
        world.apply(
            plan_complete(
                LOG_PATHS,
                world.head(),
                now_ms=0,
                closing=closing,
                empty_ledger_id=known.ledger_id,
            ).ops
        )
    _feed(append, commit.Signal.RECOVERED)


def _store(world: World, append: Append) -> None:
    assert isinstance(append.effect, Store)
    error = world.apply(append.effect.ops)
    _feed(append, commit.Signal.STORED if error is None else CallFailed(error))


def _lose(world: World, append: Append, when: str) -> None:
    assert isinstance(append.effect, Store)
    world.losses -= 1
    if when == "now":
        world.apply(append.effect.ops)
    else:
        world.late = (*world.late, append.effect.ops)
    _feed(append, CallFailed(AWAY))


def _cancel(world: World, append: Append) -> None:
    world.crashes -= 1
    if isinstance(append.effect, Store):
        world.late = (*world.late, append.effect.ops)
    append.effect = append.frozen = None


def _arrive(number: int, world: World) -> None:
    world.apply(world.late[number])
    world.late = (*world.late[:number], *world.late[number + 1 :])


# The owner


def _owner_steps(  # noqa: C901 - one case for each kind
    world: World, owner: Owner
) -> Iterator[Step]:
    def step(what: str, change: Callable[[World, Owner], None]) -> Step:
        def run(after: World) -> None:
            assert after.owner is not None
            change(after, after.owner)

        return Step(f"the owner {what}", run)

    lock = world.lock()
    if lock is not None and lock[1] != owner.heard:
        yield step("hears of its lock", _hear)
    if world.crashes:
        yield Step("the owner crashes", _crash)
    if world.writes and not owner.is_paused and not owner.is_over:
        if owner.ledger_id is None:
            yield step("opens an extent", _open)
        else:
            yield step("writes", _write)
    for event in sorted(set(owner.timers), key=repr):
        if isinstance(event, turns.TurnDue) and not world.timeouts:
            continue
        yield step(f"has waited for {event}", partial(_time, event))
    if owner.call is None:
        return
    yield step(f"is answered to {owner.call}", lambda w, o: _answer(w, o, is_lost=False))
    if world.losses and owner.call is not turns.Call.PAUSE:
        yield step(f"gets no answer to {owner.call}", lambda w, o: _answer(w, o, is_lost=True))


def _hear(world: World, owner: Owner) -> None:
    lock = world.lock()
    assert lock is not None
    owner.heard = lock[1]
    _handle(owner, turns.Signal.CHANGED)


def _time(event: turns.Signal | turns.TurnDue, world: World, owner: Owner) -> None:
    world.timeouts -= isinstance(event, turns.TurnDue)
    owner.timers = tuple(each for each in owner.timers if each != event)
    _handle(owner, event)


def _crash(world: World) -> None:
    world.crashes -= 1
    world.owner = None
    world.apply([Delete(LOG_PATHS.lock)])


def _open(world: World, owner: Owner) -> None:
    ledger_id = _OWNERS_LEDGER + len(world.ledgers)
    if owner.at.head.open_extent is not None:
        owner.at = world.head()
        return
    change = plan_start(LOG_PATHS, owner.at, ledger_id=ledger_id, now_ms=0)
    if _changed(world, owner, change):
        owner.ledger_id, world.ledgers[ledger_id] = ledger_id, 0


def _write(world: World, owner: Owner) -> None:
    assert owner.ledger_id is not None
    world.writes -= 1
    world.ledgers[owner.ledger_id] += 1


def _changed(world: World, owner: Owner, change: Change) -> bool:
    """Apply a change of the owner; if it was overtaken the head is read again."""
    is_applied = world.apply(change.ops) is None
    owner.at = change.after if is_applied else world.head()
    return is_applied


def _closing(world: World, ledger_id: int) -> Extent | None:
    count = world.ledgers[ledger_id]
    if not count:
        return None
    return Extent(
        ledger_id=ledger_id, first_entry_id=0, last_entry_id=count - 1, record_count=count
    )


def _answer(world: World, owner: Owner, *, is_lost: bool) -> None:
    call, owner.call = owner.call, None
    if is_lost:
        world.losses -= 1
        owner.heard = -1  # after a reconnection the watch fires
    lock = world.lock()
    match call:
        case turns.Call.LOOK:
            event: turns.Event = turns.Looked(None if lock is None else lock[0], 0.0)
        case turns.Call.PAUSE:
            event = _step_aside(world, owner)
        case turns.SetTurn(before, turn):
            is_set = lock is not None and lock[0].turn == before
            if lock is not None and is_set:
                held = commit.HeldLog(LOG, LOG_PATHS.lock, *lock)
                world.apply([held.turned(turn)])
            event = turns.TurnSet(is_set)
        case _:
            event = turns.HeadRead(world.head(), 0.0)
    _handle(owner, CallFailed(AWAY) if is_lost else event)


def _step_aside(world: World, owner: Owner) -> turns.Event:
    owner.is_paused = True
    if owner.ledger_id is None:
        return turns.Signal.PAUSED
    closing, ledger_id = _closing(world, owner.ledger_id), owner.ledger_id
    change = (
        plan_complete(LOG_PATHS, owner.at, now_ms=0, closing=None, empty_ledger_id=ledger_id)
        if closing is None
        else plan_pause(LOG_PATHS, owner.at, closing=closing)
    )
    owner.ledger_id = None
    if _changed(world, owner, change):
        return turns.Signal.PAUSED
    owner.is_over = True
    return CallFailed(WriteError("fenced"))


def _handle(owner: Owner, event: turns.Event) -> None:
    effects = owner.turns.handle(event)
    owner.turns.validate()
    owner.frozen = None
    for effect in effects:
        match effect:
            case turns.Call() | turns.SetTurn():
                assert owner.call is None, "one call at a time"
                owner.call = effect
            case turns.After(_, due):
                past = [each for each in owner.timers if isinstance(each, turns.TurnDue)]
                kept = [each for each in owner.timers if each not in past]
                owner.timers = (
                    (*kept, due) if isinstance(due, turns.TurnDue) else (*kept, *past, due)
                )
            case turns.StepBack(at):
                owner.is_paused, owner.at = False, at
            case turns.FailWriter():
                owner.is_over = True
            case _:
                pass
