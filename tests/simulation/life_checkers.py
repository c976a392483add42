"""Invariants of logs beside their records: names, ages, seals, watches, subscriptions.

All but the watches is judged from the stored nodes, in every state that the metadata store goes
through.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlcore.base.ids import DLSN
from dlcore.log.metadata.names import LogChangeKind
from dlcore.metadata.paths import unescape
from tests.simulation.stored_log import (
    Head,
    Kept,
    Position,
    front_of,
    read_head,
    read_kept,
    read_name,
    read_position,
)
from tests.simulation.truth import InvariantViolatedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dlcore.log.metadata.names import LogChange
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import Op
    from tests.fixtures.simulated_store import SimulatedTree

ONE_NAME = "L7 OneNamePerLog"
OLD = "L8 OnlyOldOrTruncatedGoes"
WATCHED = "L9 WatchersMissNothing"
SETTINGS = "L10 WritersFollowSettings"
SUBSCRIBED = "L11 OneReaderPerSubscription"
SEALED = "L12 SealedLogsStay"
LIFE_INVARIANTS = (ONE_NAME, OLD, WATCHED, SETTINGS, SUBSCRIBED, SEALED)

DELAY_MS_MAX = 30_000
"""From when a process looked at its clock to when what it wrote then was applied: pauses count."""


def require(name: str, *, holds: bool, message: str, ledger_id: int | None = None) -> None:
    """Raise if a promise is broken."""
    if not holds:
        raise InvariantViolatedError(name, message, ledger_id=ledger_id)


def now_ms() -> int:
    """Return the virtual time."""
    return int(asyncio.get_running_loop().time() * 1000)


def depth(path: str, root: str) -> int:
    """Return how many steps a node lies below a root; 0 if it does not."""
    return path.removeprefix(root).count("/") if path.startswith(f"{root}/") else 0


@dataclass(frozen=True, slots=True)
class Known:
    """A record, or a part of an append, that was acknowledged: where it is, and since when."""

    dlsn: DLSN
    written_ms: int


@dataclass(slots=True)
class _Life:
    """The facts about one log."""

    head: Head
    kept: list[tuple[int, Kept]] = field(default_factory=lambda: [(0, Kept())])
    """Its settings, and since when."""
    start: DLSN = DLSN.INITIAL
    """Where its first stored extent begins."""
    is_to_go: bool = False
    """A client began to delete it."""

    def kept_lately(self) -> list[Kept]:
        """Return the settings that a process which acts now may have read."""
        since = now_ms() - DELAY_MS_MAX
        last = max(n for n, (at, _) in enumerate(self.kept) if at <= max(0, since))
        return [kept for _, kept in self.kept[last:]]


class LifeCheckers:
    """Judges the nodes of logs as they change.

    `known` returns what is known of a log's records, `truncated` up to where a client began to
    truncate it, and `on_cut` is called when it is truncated up to a position.
    """

    def __init__(
        self,
        *,
        tree: SimulatedTree,
        paths: NamespacePaths,
        known: Callable[[str], Iterator[Known]],
        truncated: Callable[[str], DLSN],
        on_cut: Callable[[str, DLSN], None],
        epoch_ms: int,
    ) -> None:
        self._tree = tree
        self._paths = paths
        self._known = known
        self._truncated = truncated
        self._on_cut = on_cut
        self._epoch_ms = epoch_ms
        self._names: dict[str, tuple[str, str]] = {}  # by path: name and id
        self._lives: dict[str, _Life] = {}  # by id
        self._positions: dict[str, list[Position]] = {}  # by path of a subscription
        self._ended: dict[str, list[list[Position]]] = {}  # of those that were deleted
        self.renamed: list[tuple[str, str]] = []
        """The id of each log that was renamed, and its name from then on."""

    # Names

    @property
    def names(self) -> dict[str, str]:
        """The ids of the logs that there are, by name."""
        return dict(sorted(self._names.values()))

    def on_delete(self, log_id: str) -> None:
        """A client is going to delete a log."""
        if log_id in self._lives:
            self._lives[log_id].is_to_go = True

    def check_renamed(self, log_id: str, name: str, begin: int) -> None:
        """L7: a client got the answer that it renamed a log; `begin` renames were done at its
        call."""
        require(
            ONE_NAME,
            holds=(log_id, name) in self.renamed[begin:],
            message=f"log id {log_id} is called renamed to {name!r}, and was not",
        )

    def on_metadata(self, ops: Iterable[Op]) -> None:
        """The store applied a transaction.

        Raises:
            InvariantViolatedError: L7, L8, L11 or L12.
        """
        paths = self._paths
        touched: set[str] = set()
        for op in ops:
            if depth(op.path, paths.logs) == 2:
                touched |= self._note_name(op.path)
            elif (steps := depth(op.path, paths.heads)) >= 2:
                log_id, *below = op.path.removeprefix(f"{paths.heads}/").split("/")[1:]
                log_id = unescape(log_id)
                if steps == 2:
                    touched.add(log_id)
                elif below == ["settings"]:
                    self._note_settings(log_id, op.path)
                elif below[0] == "subscribers" and len(below) == 2:
                    self._note_position(op.path)
        for log_id in sorted(touched):
            self._note_head(log_id)
        if touched:
            self._check_names(touched)

    def _note_name(self, path: str) -> set[str]:
        before = self._names.pop(path, None)
        node = self._tree._find(path)
        touched = set() if before is None else {before[1]}
        if node is not None:
            self._names[path] = read_name(node.value)
            touched.add(self._names[path][1])
        return touched

    def _check_names(self, touched: set[str]) -> None:
        """L7: a log that was not deleted has one name, which its head says once it was renamed."""
        for log_id in sorted(touched):
            names = [name for name, each in self._names.values() if each == log_id]
            life = self._lives.get(log_id)
            is_there = life is not None and not life.head.deleted
            require(
                ONE_NAME,
                holds=len(names) == is_there,
                message=f"log id {log_id} has the names {names}, and is there: {is_there}",
            )
            if life is not None and is_there:
                require(
                    ONE_NAME,
                    holds=life.head.name in ("", *names),
                    message=f"log id {log_id} is named {names}, and its head says "
                    f"{life.head.name!r}",
                )

    # Heads

    def _note_head(self, log_id: str) -> None:
        node = self._tree._find(self._paths.log_of(log_id).head)
        life = self._lives.get(log_id)
        if node is None:
            require(
                ONE_NAME,
                holds=life is None or life.head.deleted,
                message=f"the head of log id {log_id} is gone, and it was not deleted",
            )
            return
        head = read_head(node.value)
        if life is None:
            self._lives[log_id] = _Life(head)
            return
        before, life.head = life.head, head
        if before.name != head.name:
            self.renamed.append((log_id, head.name))
        require(
            ONE_NAME,
            holds=life.is_to_go or not head.deleted,
            message=f"log id {log_id} is deleted, and no one asked for that",
        )
        require(
            SEALED,
            holds=not before.sealed or (head.sealed and head.end == before.end),
            message=f"log id {log_id} was sealed at {before.end}, and ends at {head.end}",
        )
        if not head.deleted:
            self._check_truncation(log_id, life, before)
        if not life.is_to_go:
            self._check_front(log_id, life)

    def _check_truncation(self, log_id: str, life: _Life, before: Head) -> None:
        """L8: without truncation records go by age alone; truncated ones do not come back."""
        first = life.head.first_active
        require(
            OLD,
            holds=first >= before.first_active,
            message=f"log id {log_id} is truncated at {first}, and was at {before.first_active}",
        )
        low = max(before.first_active, self._truncated(log_id))
        if first <= low:
            return
        ages = [each.retention_ms for each in life.kept_lately() if each.goes_by_age]
        for each in self._known(log_id):
            if low <= each.dlsn < first:
                self._require_old(log_id, each, ages)
        self._on_cut(log_id, first)

    def _check_front(self, log_id: str, life: _Life) -> None:
        """L8: what is truncated before its time waits for it, where the log asks for that."""
        front = front_of(self._paths.log_of(log_id).head, self._value)
        if front is None:
            return
        before, life.start = life.start, front.start
        require(
            OLD,
            holds=front.start >= before,
            message=f"log id {log_id} began at {before}, and begins at {front.start} now",
        )
        gone = [each for each in self._known(log_id) if before <= each.dlsn < front.start]
        for each in gone:
            require(
                OLD,
                holds=each.dlsn < life.head.first_active,
                message=f"log id {log_id}: {each.dlsn} goes, and was not truncated",
            )
        kept = life.kept_lately()
        if all(each.waits_for_age for each in kept):
            ages = [each.retention_ms for each in kept]
            for each in gone:
                self._require_old(log_id, each, ages)

    def _value(self, path: str) -> bytes | None:
        node = self._tree._find(path)
        return None if node is None else node.value

    def _require_old(self, log_id: str, known: Known, ages: Iterable[int]) -> None:
        age_ms = min(ages, default=None)
        require(
            OLD,
            holds=age_ms is not None and known.written_ms + age_ms <= now_ms(),
            message=f"log id {log_id}: {known.dlsn} of {known.written_ms} ms goes; records are "
            f"kept for {age_ms} ms",
        )

    def _note_settings(self, log_id: str, path: str) -> None:
        node = self._tree._find(path)
        kept = Kept() if node is None else read_kept(node.value)
        life = self._lives.get(log_id)
        if life is None:  # they come with the log
            head = self._tree._find(self._paths.log_of(log_id).head)
            if head is None:
                return
            life = self._lives[log_id] = _Life(read_head(head.value), kept=[])
            life.kept.append((0, kept))
            return
        life.kept.append((now_ms(), kept))

    def leftovers(self) -> list[str]:
        """Return the logs of which something is older than they keep it, or truncated and there."""
        found = []
        for name, log_id in self.names.items():
            life = self._lives[log_id]
            head, kept = life.head, life.kept[-1][1]
            limit_ms = now_ms() - kept.retention_ms
            if kept.goes_by_age and any(
                each.dlsn >= head.first_active and each.written_ms < limit_ms
                for each in self._known(log_id)
            ):
                found.append(f"old records of log {name}")
            if head.first_lssn < head.needed_lssn and not kept.waits_for_age:
                found.append(f"truncated segments of log {name}")
            if head.first_lssn < head.needed_lssn and kept.waits_for_age:
                young = [
                    each
                    for each in self._known(log_id)
                    if each.dlsn.lssn < head.needed_lssn and each.written_ms >= limit_ms
                ]
                if not young:
                    found.append(f"truncated and old segments of log {name}")
            front = front_of(self._paths.log_of(log_id).head, self._value)
            extent = None if front is None else head.loses(front)
            if extent is not None and (
                not kept.waits_for_age or extent.last_ms - self._epoch_ms < limit_ms
            ):
                found.append(f"truncated extents of log {name}, as that of {extent.ledger}")
        return found

    # Subscriptions

    def _note_position(self, path: str) -> None:
        """L11: a replaced holder moves it no more; its successor begins at its position."""
        node = self._tree._find(path)
        if node is None:
            if path in self._positions:
                self._ended.setdefault(path, []).append(self._positions.pop(path))
            return
        history = self._positions.setdefault(path, [])
        now = read_position(node.value)
        if history and now.token != history[-1].token:
            require(
                SUBSCRIBED,
                holds=now.token not in {each.token for each in history},
                message=f"{path} is moved to {now.dlsn} by a holder that was replaced before",
            )
            require(
                SUBSCRIBED,
                holds=now.dlsn == history[-1].dlsn,
                message=f"{path} was at {history[-1].dlsn}, and who takes it over is at {now.dlsn}",
            )
        history.append(now)

    def moves(self, log_id: str, subscriber: str) -> list[Position]:
        """Return all positions that a subscription had so far."""
        return self._positions.get(self._paths.log_of(log_id).subscriber(subscriber), [])

    def lives(self, log_id: str, subscriber: str) -> list[list[Position]]:
        """Return those of each time that it was made, until it was deleted; the last one is now."""
        path = self._paths.log_of(log_id).subscriber(subscriber)
        return [*self._ended.get(path, []), self._positions.get(path, [])]


class Watching:
    """The reports of one watch: each change follows from the names that were reported before."""

    def __init__(self, checkers: LifeCheckers) -> None:
        self._checkers = checkers
        self._ids: dict[str, str] = {}  # by name

    def on_changes(self, changes: Iterable[LogChange]) -> None:
        """L9: a log is created once, under a name that is free, and so on."""
        for change in changes:
            ids = self._ids
            match change.kind:
                case LogChangeKind.CREATED:
                    holds = change.name not in ids and change.log_id not in ids.values()
                    ids[change.name] = change.log_id
                case LogChangeKind.DELETED:
                    holds = ids.pop(change.name, None) == change.log_id
                case LogChangeKind.RENAMED:
                    assert change.old_name is not None
                    holds = ids.pop(change.old_name, None) == change.log_id
                    holds = holds and change.name not in ids
                    ids[change.name] = change.log_id
            require(WATCHED, holds=holds, message=f"{change} does not follow from earlier ones")

    @property
    def is_complete(self) -> bool:
        """Whether the reported names are those there are."""
        return self._ids == self._checkers.names

    def explain(self) -> str:
        """Return the reported names, and those there are."""
        return f"reported are {self._ids}, there are {self._checkers.names}"
