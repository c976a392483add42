"""Snapshots of many logs at once, for callers that follow them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

from dlcore.base.background import together
from dlcore.base.errors import AlreadyClosedError, CorruptMetadataError, DLError, LogNotFoundError
from dlcore.base.ids import validate_log_name, validate_log_names
from dlcore.log.metadata.changes import require_name
from dlcore.log.metadata.values import LogMetadata
from dlcore.log.reading.snapshot import LogFollower
from dlcore.metadata.one_node import persistently
from dlcore.metadata.port import UNANSWERED
from dlcore.metadata.stored import decode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import VersionedHead
    from dlcore.log.reading.scan import LogSnapshot

Outcome: TypeAlias = "LogSnapshot | DLError | None"
FOLLOWED_LOGS_MAX = 10_000
"""Logs whose last snapshot is kept.  They are watched after the second request.

Beyond this the log that was not asked for longest is dropped.
"""
FOLLOWED_SEGMENTS_MAX = 100_000
"""Segments that all of them may have together; each takes a KB or two."""
_AT_ONCE = 64


class NamedFollower(LogFollower):
    """Follows a log for as long as it has its name."""

    log: LogMetadata
    counted = 0
    """The segment count when it was last added to the total."""

    async def take_at(self, at: VersionedHead, *, heard: int = -1) -> LogSnapshot:
        """Return a snapshot; raise `LogRenamedError` if the log has another name by now."""
        require_name(self.log, at.head)
        return await super().take_at(at, heard=heard)


class LogFollowers:
    """The logs that are followed."""

    def __init__(self, context: LogContext) -> None:
        self._context = context
        self._followers: OrderedDict[str, NamedFollower] = OrderedDict()
        self._segments = 0  # the sum of all `counted`

    async def take(self, names: Sequence[str], *, fresh: bool) -> dict[str, LogSnapshot | None]:
        """Return a snapshot of each log; None if there is no log of that name.

        Raises: LedgerReadError, MetadataError.
        """
        found: dict[str, LogSnapshot | None] = {}
        for name, outcome in (await self.survey(names, fresh=fresh)).items():
            if isinstance(outcome, DLError):
                raise outcome
            found[name] = outcome
        return found

    async def follow(self, name: str, log_id: str | None) -> tuple[NamedFollower, LogSnapshot]:
        """Return the follower of a log, and a snapshot with every change before this call.

        With an id it is the log of that id, whatever its present name.

        Raises: InvalidLogNameError, LogNotFoundError, LedgerReadError, MetadataError.
        """
        name = validate_log_name(name)
        has_failed = False
        while True:
            known = self._followers.get(name)
            if log_id is not None and (known is None or known.log.log_id != log_id):
                name = (await self._context.logs.find(name, log_id)).name
            try:
                snapshot = (await self.take([name], fresh=True))[name]
            except DLError:
                is_there = known is None or self._followers.get(name) is known
                if log_id is None or is_there or has_failed:
                    raise
                has_failed = True  # the log may have been renamed, and this be another one
                continue
            follower = self._followers.get(name)
            if snapshot is None:
                # There is none, or its name has changed or is damaged: read its head.
                log = await self._context.logs.find(name, log_id)
                name = (await self._context.logs.find_again(log)).name
            elif follower is not None and snapshot.log_id == follower.log.log_id == (
                log_id or snapshot.log_id
            ):
                return follower, snapshot

    async def survey(self, names: Sequence[str], *, fresh: bool) -> dict[str, Outcome]:
        """Return a snapshot of each log; None if there is no log of that name.

        If a log's metadata is damaged, or its bookies do not answer, the value is the error.

        Raises: AlreadyClosedError, InvalidLogNameError, MetadataError.
        """
        self._context.lifetime.require_open()
        names = validate_log_names(names)
        early: dict[str, Outcome] = {}
        being_read: dict[str, tuple[NamedFollower, int]] = {}
        if fresh and names:
            # Watches fire before the answer to `sync`.  If a watch did not fire, the snapshot that
            # was read meanwhile counts: it was also read after the call.
            being_read = {
                name: (follower, follower.heard)
                for name, follower in self._followed(names).items()
                if follower.is_being_written
            }
            _, early = await together(
                persistently(lambda: self._context.store.sync(self._context.paths.heads)),
                self._refresh({name: follower for name, (follower, _) in being_read.items()}),
            )
        found: dict[str, Outcome] = {}
        for name in names:
            follower = self._followers.get(name)
            if follower is None:
                continue
            snapshot = follower.unchanged()
            if follower.is_being_written and (follower, follower.heard) == being_read.get(name):
                found[name] = early[name]
            elif snapshot is not None:
                found[name] = snapshot
            follower.watch()  # only at the second request: most plans of a batch ask once
        changed = [name for name in names if name not in found]
        found |= await self._refresh(self._followed(changed))
        # A log that is gone may have been created again.
        found |= await self._find([name for name in changed if name not in self._followers])
        left = [name for name in changed if found.get(name) is None]
        found |= await self._refresh(self._followed(left))
        self._forget_others(names)
        return {name: found.get(name) for name in names}

    def _forget_others(self, names: Sequence[str]) -> None:
        """Keep these logs, and of the others those that were asked for last, up to the limits."""
        asked = self._followed(names)
        for name, follower in asked.items():
            self._followers.move_to_end(name)
            self._segments += follower.segment_count - follower.counted
            follower.counted = follower.segment_count
        while len(self._followers) > len(asked) and (
            len(self._followers) > FOLLOWED_LOGS_MAX or self._segments > FOLLOWED_SEGMENTS_MAX
        ):
            self._let_go(*next(iter(self._followers.items())))

    async def _find(self, names: Sequence[str]) -> dict[str, Outcome]:
        """Follow the logs that exist; return the errors of others."""
        paths = [self._context.paths.log(name) for name in names]
        if not paths:
            return {}
        failed: dict[str, Outcome] = {}
        nodes = await persistently(lambda: self._context.store.get_many(paths, fresh=True))
        for name, path, node in zip(names, paths, nodes, strict=True):
            if node is None or name in self._followers:  # another call was quicker
                continue
            try:
                log = decode(LogMetadata, node.value, source=path)
            except CorruptMetadataError as error:
                failed[name] = error
            else:
                self._followers[name] = NamedFollower(self._context, log)
        return failed

    def _followed(self, names: Sequence[str]) -> dict[str, NamedFollower]:
        return {name: self._followers[name] for name in names if name in self._followers}

    async def _refresh(self, followed: Mapping[str, NamedFollower]) -> dict[str, Outcome]:
        """Return snapshots of the logs; logs that are gone are no longer followed."""
        if not followed:
            return {}
        followers = list(followed.values())
        known = [follower.head() for follower in followers]
        heard = [follower.heard for follower in followers]
        asked = [index for index, head in enumerate(known) if head is None]
        paths = [self._context.logs.paths_of(followers[index].log).head for index in asked]
        nodes = await persistently(lambda: self._context.store.get_many(paths, fresh=True))
        there = dict(zip(asked, nodes, strict=True))
        limit = asyncio.Semaphore(_AT_ONCE)

        async def take(name: str, index: int) -> Outcome:
            follower = followers[index]
            try:
                async with limit:
                    at = known[index]
                    if at is None:
                        at = self._context.logs.head_of(follower.log, there[index])
                    return await follower.take_at(at, heard=heard[index])
            except LogNotFoundError:
                self._let_go(name, follower)
                return None
            except (AlreadyClosedError, *UNANSWERED):
                raise
            except DLError as error:
                self._let_go(name, follower)  # the next call looks it up again
                return error

        taken = await together(*(take(name, index) for index, name in enumerate(followed)))
        return dict(zip(followed, taken, strict=True))

    def _let_go(self, name: str, follower: NamedFollower) -> None:
        follower.close()
        if self._followers.get(name) is follower:  # else another call has dropped it
            del self._followers[name]
            self._segments -= follower.counted

    def __len__(self) -> int:
        return len(self._followers)

    def close(self) -> None:
        """Stop following all logs."""
        for follower in self._followers.values():
            follower.close()
        self._followers.clear()
        self._segments = 0
