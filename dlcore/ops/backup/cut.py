"""A consistent copy of a namespace's metadata, out of readings made while it is in use; pure.

A walk of the tree takes a while, and transactions go on meanwhile: a commit changes the heads of
many logs and its record at once, and a walk may see some of them before it and others after it.
Therefore the copy is a cut: all logs and commits as they were right after one transaction.

Four readings are given.  `before` has all nodes, `early` the heads and the records of commits.  The
cut is right after the last transaction that either of them saw.  Then come `late`, which is again
the heads and records, and `after`, which is again all nodes.  The number of the transaction that
changed a node last says what it was at the cut:

- it was not changed since: it is what the second reading saw;
- it was changed once since, as its version says: it is what the first reading saw;
- it was created since: it was not there;
- otherwise this is not known, and `NotKnownError` asks for other readings.

Heads and records, which change all the time, are read in a moment, right before and after the cut.
Nodes that are deleted leave no trace of when.  For these and for the rest the heads decide:

- Segments and chunks are those that a log's head names; they must follow each other without a gap.
- Ledgers are copied as they were read last.  A later state is one that a writer's death right after
  the cut would have left.  One that was deleted since is copied if a log of the cut names it.
- Staged records that were not committed at the cut are left out.  How many extents refer to a
  staged ledger is counted in the logs of the cut, so that it is never removed too early.
- A subscription is at most as far as it was at the cut.
- Deleted logs are left out, and all that lives no longer than a session.
- Everything else stands for itself, and is copied as it was read last.

A log whose metadata are damaged is left out, and the copy says so.  A node that does not decode is
damaged, and so is one that is missing or does not fit a head that is known not to have changed
during both readings of all nodes.  It is not known then how many extents of such a log refer to a
staged ledger, so the stored number counts if it is higher: rather a ledger stays for ever than it
goes too early.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from msgspec.structs import replace

from dlcore.base.errors import CorruptMetadataError
from dlcore.log.metadata.values import (
    Chunk,
    LogHead,
    LogMetadata,
    RetainedLog,
    SegmentEnd,
    StagedLedger,
    StoredSettings,
)
from dlcore.metadata.paths import LogPaths, name_of_component
from dlcore.metadata.stored import decode, encode
from dlcore.metadata.tree import parent_of
from dlcore.ops.backup.archive import LeftOut

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import msgspec

    from dlcore.log.metadata.segment import Extent
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import Versioned

_S = TypeVar("_S", bound="msgspec.Struct")
Reading: TypeAlias = "Mapping[str, Versioned]"
"""Permanent nodes by path; each was read some time during the reading."""


class NotKnownError(Exception):
    """Something changed too often, or at an unknown time: `paths` are some of it.

    This error never leaves the rooms of the backup.
    """

    def __init__(self, paths: Collection[str]) -> None:
        super().__init__(f"{len(paths)} nodes changed meanwhile, such as {min(paths)}")
        self.paths = tuple(sorted(paths))


@dataclass(frozen=True, slots=True)
class Copy:
    """The nodes of a namespace by path, and what they are about."""

    nodes: Mapping[str, bytes]
    moment: int
    """The number of the last transaction that it has of logs and commits."""
    logs: int
    ledgers: int
    missing: tuple[int, ...]
    """Ledgers that a log names and that do not exist: their records are lost already."""
    left_out: tuple[LeftOut, ...]
    """Logs that are not in it, because their metadata are damaged."""


def anchors_at(
    paths: NamespacePaths, early: Reading, late: Reading, moment: int
) -> dict[str, Versioned]:
    """Return the heads and records of commits right after the transaction `moment`.

    Heads of logs that were deleted before, and old records, may be removed meanwhile.

    Raises:
        NotKnownError: one of them changed twice between the readings.
    """
    found: dict[str, Versioned] = {}
    unknown = set()
    for path in early.keys() | late.keys():
        if path not in late and _is_removable(paths, path, early[path]):
            continue
        try:
            node = _at(path, early, late, moment)
        except NotKnownError:
            unknown.add(path)
        else:
            if node is not None:
                found[path] = node
    if unknown:
        raise NotKnownError(unknown)
    return found


def _is_removable(paths: NamespacePaths, path: str, node: Versioned) -> bool:
    if not path.startswith(f"{paths.heads}/"):
        return True
    try:
        return decode(LogHead, node.value, source=path).deleted
    except CorruptMetadataError:
        return True  # it was deleted as damaged


def _at(path: str, first: Reading, second: Reading, moment: int) -> Versioned | None:
    """Return the node right after the transaction `moment`, which is between the readings.

    Raises:
        NotKnownError: the readings do not tell.
    """
    old, new = first.get(path), second.get(path)
    if new is not None and new.changed <= moment:
        return new
    if new is not None and old is None and new.created > moment:
        return None
    if (
        new is not None
        and old is not None
        and new.created == old.created
        and new.version == old.version + 1
    ):
        return old
    raise NotKnownError([path])


def moment_of(*readings: Reading) -> int:
    """Return the number of the last transaction that the readings saw."""
    return max(node.changed for reading in readings for node in reading.values())


def copy_of(
    paths: NamespacePaths,
    before: Reading,
    anchors: Reading,
    after: Reading,
    moment: int,
    steady: Collection[str] = (),
) -> Copy:
    """Return the copy.

    Args:
        paths: the namespace's paths.
        before: the first reading of all nodes.
        anchors: the heads and records of commits at the cut, of `anchors_at`.
        after: the second reading of all nodes.
        moment: the number of the cut's transaction.
        steady: heads that did not change from before the first until after the second reading.

    Raises:
        NotKnownError: other readings are needed.
    """
    return _Cut(paths, before, anchors, after, moment, frozenset(steady)).copy()


@dataclass(slots=True)
class _Cut:
    paths: NamespacePaths
    before: Reading
    anchors: Reading
    after: Reading
    moment: int
    steady: frozenset[str]
    nodes: dict[str, bytes] = field(default_factory=dict)
    references: Counter[int] = field(default_factory=Counter)
    left_out: list[LeftOut] = field(default_factory=list)

    def copy(self) -> Copy:
        root = self.paths.root
        if self.before[root].created != self.after[root].created:
            raise NotKnownError([root])  # the server numbers its transactions anew
        self._take_rest()
        logs = self._take_logs()
        missing = self._take_ledgers()
        for path in [*self.nodes]:
            self._take_parents(path)
        ledgers = sum(1 for _ in _ledgers_in(self.paths, self.nodes))
        left_out = tuple(sorted(self.left_out, key=lambda each: each.log))
        return Copy(self.nodes, self.moment, logs, ledgers, missing, left_out)

    def _at(self, path: str) -> Versioned | None:
        """Return a node at the cut; the earlier value of one that is gone."""
        if path in self.before and path not in self.after:
            return self.before[path]
        return _at(path, self.before, self.after, self.moment)

    def _take_parents(self, path: str) -> None:
        while path != self.paths.root:
            path = parent_of(path)
            if path in self.nodes:
                return
            self.nodes[path] = b""

    def _take_rest(self) -> None:
        """Take what stands for itself, and the lists that are always there."""
        paths = self.paths
        left_out = (
            *(paths.logs, paths.heads, paths.commits, paths.ledgers, paths.staging, paths.merged),
            *(paths.retained_logs, paths.deleted_logs, paths.upkeep_requests),
            *(paths.garbage_releases, paths.erasures, paths.redactions),
        )
        for path, node in self.after.items():
            if not any(path.startswith(f"{above}/") for above in left_out):
                self.nodes[path] = node.value
        self.nodes.update(dict.fromkeys(paths.buckets, b""))
        for path, node in self.anchors.items():
            if path.startswith(f"{paths.commits}/"):
                self.nodes[path] = node.value
        # As it was read last: an id that was given after the cut must not be given again.
        self.nodes[paths.ledger_idgen] = self.after[paths.ledger_idgen].value

    # Logs

    def _take_logs(self) -> int:
        """Take the live logs with all that belongs to them; return how many."""
        names = self._names()
        prefix, count = f"{self.paths.heads}/", 0
        below = _below_heads(prefix, [*self.before, *self.after])
        unknown: set[str] = set()
        for path, node in self.anchors.items():
            if not path.startswith(prefix):
                continue
            name = names.get(path)
            try:
                count += self._take_log(path, node, name, below)
            except NotKnownError as error:
                unknown.update(error.paths)
            except CorruptMetadataError as error:
                known = f"id {path.rpartition('/')[2]}" if name is None else name[1].name
                self.left_out.append(LeftOut(known, str(error)))
        if unknown:
            raise NotKnownError(unknown)
        return count

    def _take_log(
        self,
        path: str,
        node: Versioned,
        name: tuple[str, LogMetadata, bytes] | None,
        below: Mapping[str, set[str]],
    ) -> bool:
        """Take a log, or nothing of it; return whether it lives."""
        head = decode(LogHead, node.value, source=path)
        if head.deleted:
            return False
        if name is None:
            raise self._doubt(path, f"the name of {path}")
        nodes, references = self.nodes, self.references
        self.nodes, self.references = {path: node.value, name[0]: name[2]}, Counter()
        try:
            self._take_segments(LogPaths(path), head)
            self._take_beside(path, name[1], below)
            nodes.update(self.nodes)
            references.update(self.references)
        finally:
            self.nodes, self.references = nodes, references
        return True

    def _doubt(self, head: str, path: str) -> Exception:
        """Return what a node means that is missing, or does not fit its log's head."""
        if head in self.steady:
            return CorruptMetadataError(f"{path} is missing, or does not fit the log's head")
        return NotKnownError([path])

    def _names(self) -> dict[str, tuple[str, LogMetadata, bytes]]:
        """Return path, name and value of the node of each log's name, by the path of its head."""
        prefix = f"{self.paths.logs}/"
        found: dict[str, tuple[str, LogMetadata, bytes]] = {}
        gone: dict[str, tuple[str, LogMetadata, bytes]] = {}
        for path in self.before.keys() | self.after.keys():
            if path.startswith(prefix) and path.count("/", len(prefix)) == 1:
                node = self._at(path)
                if node is None:
                    continue
                try:
                    log = decode(LogMetadata, node.value, source=path)
                except CorruptMetadataError as error:
                    component = path.rpartition("/")[2]
                    known = name_of_component(component) or component
                    self.left_out.append(LeftOut(known, str(error)))
                    continue
                into = found if path in self.after else gone
                into[self.paths.log_of(log.log_id).head] = path, log, node.value
        return gone | found  # a name that is gone counts only where no other one was there

    def _take_beside(self, path: str, name: LogMetadata, below: Mapping[str, set[str]]) -> None:
        """Take what a log has beside its segments."""
        log = LogPaths(path)
        known = below.get(path, set())
        for each in known & {log.settings, log.schema}:
            if (node := self._at(each)) is not None:
                self.nodes[each] = node.value
        for each in known:
            if each == log.subscribers or each.startswith(f"{log.subscribers}/"):
                self._take_early(each)
        if log.settings in self.nodes and self._needs_visits(log.settings):
            listed = encode(RetainedLog(name=name.name, log_id=name.log_id))
            self.nodes[self.paths.retained_log(name.log_id)] = listed
        self._take_early(self.paths.upkeep_request(name.log_id))

    def _needs_visits(self, path: str) -> bool:
        value = self.nodes[path]
        try:
            return decode(StoredSettings, value, source=path).settings.needs_visits
        except CorruptMetadataError:
            return True  # the worker that visits the log tells of the damage, as before

    def _take_segments(self, log: LogPaths, head: LogHead) -> None:
        """Take the segments of a log."""
        last = head.max_lssn
        if head.segment is not None:
            self._count(head.segment.tail)
            chunks = range(head.segment.chunk_count)
            if chunks:
                self.nodes[log.segment(last)] = b""
            self._take_chunks(log, head, last, chunks, head.segment.chunked.entries)
            last -= 1
        for lssn in range(head.first_lssn, last + 1):
            end = self._decoded(log, SegmentEnd, log.segment(lssn))
            self._count(end.tail)
            self._take_chunks(log, head, lssn, range(end.chunk_count), end.chunked.entries)

    def _take_chunks(
        self, log: LogPaths, head: LogHead, lssn: int, numbers: range, entries: int
    ) -> None:
        """Take the chunks of a segment, which must end with so many entries."""
        is_first = lssn == head.first_lssn  # which may have lost extents at its front
        number = head.first_chunk if is_first else 0
        expected: int | None = None if is_first else 0
        while number < numbers.stop:
            path = log.chunk(lssn, number)
            chunk = self._decoded(log, Chunk, path)
            if expected not in (None, chunk.first_entry_id):
                raise self._doubt(log.head, path)
            self._count(chunk.extents)
            expected = chunk.first_entry_id + sum(each.entry_count for each in chunk.extents)
            number += chunk.covers
        if numbers and expected not in (None, entries):
            raise self._doubt(log.head, log.segment(lssn))

    def _decoded(self, log: LogPaths, kind: type[_S], path: str) -> _S:
        node = self._at(path) if path in self.before or path in self.after else None
        if node is None:
            raise self._doubt(log.head, path)
        try:
            value = decode(kind, node.value, source=path)
        except CorruptMetadataError:
            if not node.value:  # a segment that is not completed yet
                raise self._doubt(log.head, path) from None
            raise
        self.nodes[path] = node.value
        return value

    def _take_early(self, path: str) -> None:
        """Take a node as it was at the cut or before it, if it is still there."""
        node = self.after.get(path)
        if node is not None and node.changed > self.moment:
            node = self.before.get(path)
        if node is not None:
            self.nodes[path] = node.value

    def _count(self, extents: Collection[Extent]) -> None:
        self.references.update(extent.ledger_id for extent in extents)

    # Ledgers

    def _take_ledgers(self) -> tuple[int, ...]:
        """Take the ledgers; return those that a log names and that do not exist."""
        left = set(self.references)
        for ledger_id, path in _ledgers_in(self.paths, self.before.keys() | self.after.keys()):
            staged_path = self.paths.staged_ledger(ledger_id)
            staged = self.after.get(staged_path) or self.before.get(staged_path)
            count = self._extents_of(ledger_id, staged_path, staged)
            node = self.after.get(path)
            is_younger = node is None or node.created > self.moment
            if count == 0 and (staged is not None or is_younger):
                continue
            left.discard(ledger_id)
            self.nodes[path] = (node or self.before[path]).value
            if staged is not None:
                self._take_staged(staged_path, staged, count)
        return tuple(sorted(left))

    def _extents_of(self, ledger_id: int, path: str, staged: Versioned | None) -> int:
        """Return how many extents refer to a ledger, at most if some are not known."""
        count = self.references[ledger_id]
        if staged is None:
            return count
        try:
            stored = decode(StagedLedger, staged.value, source=path).extents
        except CorruptMetadataError:
            return max(count, 1)
        return max(count, stored) if self.left_out else count

    def _take_staged(self, path: str, node: Versioned, extents: int) -> None:
        try:
            staged = decode(StagedLedger, node.value, source=path)
        except CorruptMetadataError:
            self.nodes[path] = node.value  # it stays what it is, and its ledger stays
            return
        self.nodes[path] = encode(replace(staged, extents=extents))
        if not staged.settled:
            self.nodes[self.paths.staging_entry(staged.identity, staged.ledger_id)] = b""


def _below_heads(prefix: str, paths: Collection[str]) -> dict[str, set[str]]:
    """Return the paths below each head."""
    found: dict[str, set[str]] = {}
    for path in paths:
        if path.startswith(prefix) and path.count("/", len(prefix)) > 1:
            bucket, log, _ = path[len(prefix) :].split("/", 2)
            found.setdefault(f"{prefix}{bucket}/{log}", set()).add(path)
    return found


def _ledgers_in(paths: NamespacePaths, among: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield the ledgers among the paths of nodes, each with its path."""
    prefix = f"{paths.ledgers}/"
    for path in among:
        if path.startswith(prefix) and path.count("/", len(prefix)) == 2:
            yield paths.ledger_id_of(*path[len(prefix) :].split("/")), path
