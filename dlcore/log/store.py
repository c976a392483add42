"""Reading and changing the metadata of logs: consistent reads, guarded writes, classified replies.

A reply that was lost says nothing.  `apply` then looks at what is stored: the guard's version tells
whether the change was not applied (it is tried again), was applied (the values are there), or was
overtaken, which is reported as a lost compare-and-set, so that the caller plans again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, TypeVar

from dlcore.errors import (
    LogExistsError,
    LogNotFoundError,
    MetadataConnectionError,
    MetadataSessionExpiredError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
    UnexpectedError,
)
from dlcore.ids import validate_log_name
from dlcore.log import codec
from dlcore.log.changes import Change, plan_create
from dlcore.log.metadata import LockHolder, LogMetadata, LogState
from dlcore.log.segment import LogSegment, SegmentState, Truncation
from dlcore.metadata.paths import LogPaths, NamespacePaths, unescape
from dlcore.metadata.port import Create, Delete, MetadataStore, Op, Put, Versioned

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

_Result = TypeVar("_Result")

UNANSWERED = (MetadataConnectionError, MetadataSessionExpiredError)
"""A write that ended in one of these may or may not have been applied."""
_RETRY_DELAYS_S = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0)
"""Waits between tries of a read: together longer than a session time-out of 10 s."""
_READ_ATTEMPTS_MAX = 100
"""Every failed attempt means that somebody else changed the log in the meantime."""
CHANGE_BYTES_MAX = 1_000_000
"""ZooKeeper closes the connection on a request above 1 MB (jute.maxbuffer)."""
_OP_OVERHEAD_BYTES = 64
"""What an operation takes in a request beyond its path and value, at most: header, ACL, flags."""


async def persistently(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return the result of `call`, an idempotent one, trying again while there is no answer."""
    for delay_s in _RETRY_DELAYS_S:
        try:
            return await call()
        except UNANSWERED:
            await asyncio.sleep(delay_s)
    return await call()


class LogStore:
    """The logs of one namespace, as the metadata store holds them."""

    def __init__(self, store: MetadataStore, paths: NamespacePaths) -> None:
        self._store = store
        self._paths = paths

    @property
    def metadata_store(self) -> MetadataStore:
        """The session used."""
        return self._store

    def paths_of(self, name: str) -> LogPaths:
        """Return the paths of a log."""
        return self._paths.log(name)

    async def create(self, metadata: LogMetadata) -> None:
        """Create an empty log.

        Raises:
            LogExistsError: there is one of that name, with another id.
        """
        paths = self.paths_of(metadata.name)
        await self._make_bucket(metadata.name)
        try:
            await self._store.multi(plan_create(paths, metadata))
        except NodeExistsError as error:
            raise LogExistsError(f"log {metadata.name!r} exists") from error
        except UNANSWERED as error:
            found = await persistently(lambda: self._fresh(paths.node))
            if found is None:
                raise
            if codec.decode_log(found.value, path=paths.node).log_id != metadata.log_id:
                raise LogExistsError(f"log {metadata.name!r} exists") from error

    async def _make_bucket(self, name: str) -> None:
        bucket = self._paths.log_bucket(name)
        if await persistently(lambda: self._store.get(bucket)) is not None:
            return

        async def make() -> None:
            with contextlib.suppress(NodeExistsError):  # another client made it
                await self._store.create(bucket, make_parents=True)

        await persistently(make)

    async def exists(self, name: str) -> bool:
        """Return whether there is a log `name`."""
        node = self.paths_of(name).node
        return await persistently(lambda: self._fresh(node)) is not None

    async def list_logs(self, prefix: str | None) -> list[str]:
        """Return the sorted names of the logs that start with `prefix`."""
        buckets = await persistently(lambda: self._store.get_children(self._paths.logs)) or []
        names: list[str] = []
        for bucket in buckets:
            path = f"{self._paths.logs}/{bucket}"
            children = await persistently(lambda path=path: self._store.get_children(path))  # type: ignore[misc]
            names += [unescape(child) for child in children or []]
        return sorted(name for name in names if name.startswith(prefix or ""))

    async def _fresh(self, path: str) -> Versioned | None:
        await self._store.sync(path)
        return await self._store.get(path)

    async def read(self, name: str, *, known: LogState | None = None) -> LogState:
        """Return the log's state, with every change that completed before this call.

        Segments of `known`, an earlier state, that cannot have changed since are not read again.

        Raises:
            LogNotFoundError: there is no such log.
            UnexpectedError: the stored state contradicts itself.
        """
        validate_log_name(name)
        return await persistently(lambda: self._read(name, known))

    async def reread(self, state: LogState) -> LogState:
        """Return the present state of the log that `state` was read of.

        Raises:
            LogNotFoundError: it was deleted, perhaps created again: that is another log.
        """
        found = await self.read(state.name, known=state)
        if found.metadata.log_id != state.metadata.log_id:
            raise LogNotFoundError(
                f"log {state.name!r} was deleted and created again: open it again"
            )
        return found

    async def _read(self, name: str, known: LogState | None) -> LogState:
        paths = self.paths_of(name)
        await self._store.sync(paths.node)
        for _ in range(_READ_ATTEMPTS_MAX):
            state = await self._read_once(name, paths, known)
            if state is not None:
                return state
        raise UnexpectedError(
            f"log {name!r} changed during each of {_READ_ATTEMPTS_MAX} attempts to read it"
        )

    async def _read_once(
        self, name: str, paths: LogPaths, known: LogState | None
    ) -> LogState | None:
        """Read everything between two reads of the guard; None if it changed in between."""
        node, guard, txid, children = await asyncio.gather(
            self._store.get(paths.node),
            self._store.get(paths.max_lssn),
            self._store.get(paths.max_txid),
            self._store.get_children(paths.segments),
        )
        if node is None:
            raise LogNotFoundError(f"log {name!r} does not exist in {self._paths.root}")
        metadata = codec.decode_log(node.value, path=paths.node)
        if known is not None and known.metadata.log_id != metadata.log_id:
            known = None
        if guard is not None and known is not None and guard.version == known.version:
            return known
        segments = await self._read_segments(paths, sorted(children or []), known)
        again, node_again = await asyncio.gather(
            self._store.get(paths.max_lssn), self._store.get(paths.node)
        )
        if again != guard or node_again != node:
            return None
        if guard is None or txid is None or children is None:
            raise UnexpectedError(f"log {name!r}: nodes below {paths.node} are missing")
        if segments is None:
            raise UnexpectedError(f"log {name!r}: segments vanished while nothing changed")
        return LogState(
            metadata=metadata,
            max_lssn=codec.decode_max_lssn(guard.value, path=paths.max_lssn),
            version=guard.version,
            max_txid=codec.decode_max_txid(txid.value, path=paths.max_txid),
            segments=segments,
        )

    async def _read_segments(
        self, paths: LogPaths, names: list[str], known: LogState | None
    ) -> tuple[LogSegment, ...] | None:
        """Return the segments; None if one is gone.

        Truncation goes from the front, so once a known segment is found untouched, the completed
        ones known after it are too.
        """
        unchanged = {
            segment.lssn: segment
            for segment in (known.segments if known is not None else ())
            if segment.state is SegmentState.COMPLETED and segment.truncation is Truncation.ACTIVE
        }
        lssns = [_lssn_of(name, paths) for name in names]
        segments: dict[int, LogSegment] = {}
        for lssn in lssns:
            if lssn not in unchanged:
                continue
            segment = await self._read_segment(paths, lssn)
            if segment is None:
                return None
            segments[lssn] = segment
            if segment.truncation is Truncation.ACTIVE:
                segments |= {n: unchanged[n] for n in lssns if n > lssn and n in unchanged}
                break
        missing = [lssn for lssn in lssns if lssn not in segments]
        found = await asyncio.gather(*(self._read_segment(paths, lssn) for lssn in missing))
        for lssn, segment in zip(missing, found, strict=True):
            if segment is None:
                return None
            segments[lssn] = segment
        return tuple(segments[lssn] for lssn in lssns)

    async def _read_segment(self, paths: LogPaths, lssn: int) -> LogSegment | None:
        path = paths.segment(lssn)
        node = await self._store.get(path)
        if node is None:
            return None
        segment = codec.decode_segment(node.value, path=path)
        if segment.lssn != lssn:
            raise UnexpectedError(f"{path} holds segment {segment.lssn}")
        return segment

    async def read_lock(self, name: str) -> LockHolder | None:
        """Return who holds the writer lock."""
        path = self.paths_of(name).lock
        node = await persistently(lambda: self._fresh(path))
        return None if node is None else codec.decode_lock(node.value, path=path)

    async def apply(self, change: Change) -> LogState:
        """Apply a planned change; return the state after it.

        Raises:
            MetadataVersionError: the log changed since it was read, or this change was applied and
                overtaken: read it and plan again.
            LogNotFoundError: the log is gone.
        """
        require_change_size(change.ops)
        for delay_s in _RETRY_DELAYS_S:
            try:
                await self._store.multi(change.ops)
            except UNANSWERED:
                if await persistently(lambda: self._is_applied(change)):
                    break
                await asyncio.sleep(delay_s)
            except (NodeExistsError, NoNodeError, MetadataVersionError) as error:
                raise await self._conflict(change.state.name, error) from error
            else:
                break
        else:
            raise MetadataConnectionError(
                f"log {change.state.name!r}: the metadata store did not answer to a change"
            )
        return change.state

    async def _conflict(self, name: str, error: Exception) -> Exception:
        if not await self.exists(name):
            return LogNotFoundError(f"log {name!r} was deleted")
        return MetadataVersionError(f"log {name!r} was changed by somebody else: {error}")

    async def _is_applied(self, change: Change) -> bool:
        """Return whether `change` is what is stored; False if the log is as it was before.

        Raises:
            MetadataVersionError: neither.
        """
        state = change.state
        guard_path = self.paths_of(state.name).max_lssn
        guard = await self._fresh(guard_path)
        if guard is not None and guard.version == state.version - 1:
            return False
        if guard is not None and guard.version == state.version:
            stored = await asyncio.gather(*(self._is_stored(op) for op in change.ops))
            if all(stored):
                return True
        raise MetadataVersionError(f"log {state.name!r} was changed by somebody else")

    async def _is_stored(self, op: Op) -> bool:
        node = await self._store.get(op.path)
        match op:
            case Create() | Put():
                return node is not None and node.value == op.value
            case Delete():
                return node is None
            case _:
                return True


def require_change_size(ops: Sequence[Op]) -> None:
    """Refuse what the metadata store could not take in one transaction."""
    size = sum(
        len(op.path.encode())
        + len(op.value if isinstance(op, Create | Put) else b"")
        + _OP_OVERHEAD_BYTES
        for op in ops
    )
    if size > CHANGE_BYTES_MAX:
        raise UnexpectedError(
            f"a metadata transaction of {size} bytes exceeds the limit of {CHANGE_BYTES_MAX}: "
            "append fewer extents at once"
        )


def _lssn_of(name: str, paths: LogPaths) -> int:
    if not name.isdigit():
        raise UnexpectedError(f"{paths.segments} holds a node {name!r} that is no segment")
    return int(name)
