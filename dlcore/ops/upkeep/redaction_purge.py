"""Removes the old copies of redacted rows: histories of tables, ledgers, objects, bookies' files.

Each step may be repeated, and returns sentences on what it could not remove yet.  The redaction's
node names what was replaced; a dead process therefore loses nothing of it.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from dlcore.base.errors import (
    CorruptMetadataError,
    NodeExistsError,
    NodeNotEmptyError,
    NoNodeError,
    UnexpectedError,
)
from dlcore.ledger.metadata.values import BookieCookie, Erased, Erasure
from dlcore.log.metadata.redactions import redaction_in
from dlcore.log.upkeep.staged import drop_merged, list_staged, read_staged, settle
from dlcore.metadata.one_node import persistently
from dlcore.metadata.paths import is_number, unescape
from dlcore.metadata.port import CONFLICTS, Create, Delete
from dlcore.metadata.stored import decode, encode
from dlcore.ops.upkeep.strays import delete_unnamed, looked_into, tier_urls
from dlcore.ops.upkeep.swap import MERGING_IDENTITY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.log.metadata.redactions import StoredRedaction, VersionedRedaction
    from dlcore.log.metadata.values import LogMetadata

_LEDGERS_AT_ONCE = 500
_SHOWN_MAX = 3


class Purger:
    """Removes the old copies of one log's rows.

    Args:
        context: the namespace's adapters.
        owner: the node that shows that this process lives.
        log: the log.
    """

    def __init__(self, context: LogContext, owner: StagingOwner, log: LogMetadata) -> None:
        self._context = context
        self._owner = owner
        self._log = log
        self.last: StoredRedaction | None = None
        """The redaction as it was read last; it stays when it is finished."""

    async def read(self) -> VersionedRedaction | None:
        """Return the redaction as it is stored; None if there is none."""
        paths = self._context.paths
        path = paths.redaction(self._log.log_id)
        node = await persistently(lambda: self._context.store.get(path, fresh=True))
        found = redaction_in(paths, self._log.log_id, node)
        self.last = self.last if found is None else found.stored
        return found

    async def begun(self) -> VersionedRedaction:
        """Return the redaction as it is stored.

        Raises:
            UnexpectedError: there is none.
        """
        found = await self.read()
        if found is None:
            raise UnexpectedError(
                f"the redaction of log {self._log.name!r} was removed meanwhile: run the command "
                "again"
            )
        return found

    # The table

    async def follow(self) -> Sequence[str]:
        """Let the table follow the chain, and forget all versions but the newest.

        Raises:
            DLError: the table is refused, or cannot be changed now.
        """
        context = self._context
        at, settings = await context.logs.open(self._log)
        if settings.table is None or settings.tier_url is None:
            return ()
        from dlcore.log.cold.delta_format import DELTA
        from dlcore.log.cold.delta_tables import DeltaTables
        from dlcore.log.cold.table_format import app_id_of
        from dlcore.log.cold.tables import forms_in
        from dlcore.ops.upkeep.table_keeper import TableKeeper  # it loads Arrow

        # A keeper that knows nothing compares all files with the chain, here at once.
        keeper = TableKeeper(context, self._owner, compare_every_s=0, compare_max=sys.maxsize)
        await keeper.follow(at.log)
        app_id = app_id_of(context.cluster_id, self._log.log_id)
        url = f"{settings.tier_url}/{app_id}"
        if DELTA in await forms_in(context.cold.objects, url):
            await DeltaTables(url, app_id, context.cold.objects).forget_history()
        return ()

    # Ledgers

    async def drop(self) -> Sequence[str]:
        """Delete the ledgers that were replaced, by this redaction or by earlier merges."""
        context = self._context
        merging = await list_staged(context, MERGING_IDENTITY)
        await settle(context, merging)  # those of dead workers go, with what they had copied
        begun = await self.begun()
        earlier = set(await self._merged_of_log()) - set(begun.stored.ledgers)
        if earlier:
            await context.store.multi([begun.put(ledgers=earlier)])
        ids = sorted({*begun.stored.ledgers, *earlier})
        if ids:
            await drop_merged(context, grace_ms=0, at_once=frozenset(ids))
        return [*await self._undropped(ids), *await self._filled_by_others()]

    async def _filled_by_others(self) -> list[str]:
        """Return sentences on ledgers of the log that workers fill, who took it to be theirs."""
        context = self._context
        ids = await list_staged(context, MERGING_IDENTITY)
        nodes = await read_staged(context, ids)
        ledgers = await context.ledger_store.read_many(ids)
        return [
            f"ledger {each} is being filled by a worker of auto-recovery"
            for each, node in nodes.items()
            if not node.staged.settled
            and node.staged.owner != self._owner.token
            and self._may_be_ours(ledgers.get(each))
        ]

    def _may_be_ours(self, ledger: LedgerMetadata | CorruptMetadataError | None) -> bool:
        """Return whether a ledger may have entries of the log: it does not say another one."""
        if ledger is None:
            return False
        custom = {} if isinstance(ledger, CorruptMetadataError) else ledger.custom
        return custom.get("log", self._log.name) == self._log.name

    async def _merged_of_log(self) -> list[int]:
        """Return the merged ledgers that may be this log's: those that do not say another one."""
        context = self._context
        head = (await context.logs.read(self._log)).head
        names = await persistently(lambda: context.store.get_children(context.paths.merged))
        ids = sorted(int(name) for name in names or () if is_number(name))
        if head.name:  # it was renamed, and its ledgers may say any earlier name
            return ids
        found = []
        for start in range(0, len(ids), _LEDGERS_AT_ONCE):
            ledgers = await context.ledger_store.read_many(ids[start : start + _LEDGERS_AT_ONCE])
            found += [each for each, ledger in ledgers.items() if self._may_be_ours(ledger)]
        return found

    async def _undropped(self, ids: Sequence[int]) -> list[str]:
        context, left = self._context, []
        for start in range(0, len(ids), _LEDGERS_AT_ONCE):
            some = ids[start : start + _LEDGERS_AT_ONCE]
            wanted = [context.paths.ledger(each) for each in some]
            locks = [context.paths.repair_lock(each) for each in some]
            nodes = await persistently(
                lambda wanted=wanted, locks=locks: context.store.get_many(  # type: ignore[misc]
                    [*wanted, *locks], fresh=True
                )
            )
            there = [each for each, node in zip(some, nodes, strict=False) if node is not None]
            staged = await read_staged(context, there)
            left += [
                f"ledger {each} is being filled by an append (dlog staging list)"
                if each in staged and not staged[each].staged.settled
                else f"ledger {each} cannot be deleted yet: extents of logs refer to it"
                for each in there
            ]
            # A repair may still copy entries of a ledger that is gone.
            left += [
                f"ledger {each} is being repaired"
                for each, node in zip(some, nodes[len(some) :], strict=True)
                if node is not None and each not in there
            ]
        return _shortened(left)

    # Objects

    async def delete(self) -> Sequence[str]:
        """Delete the log's objects that no ledger names, in all tiers, whatever their age.

        Raises:
            ObjectStoreError: a store does not answer.
        """
        context = self._context
        count, kept = 0, list[str]()
        for tier in await tier_urls(context):
            folder = f"{tier}/{context.cluster_id}/{self._log.log_id}"
            with looked_into(tier):
                guard = await self._guard(folder)
                async for page in context.cold.objects.list_below(folder):
                    for start in range(0, len(page), _LEDGERS_AT_ONCE):
                        urls = [each.url for each in page[start : start + _LEDGERS_AT_ONCE]]
                        count += await delete_unnamed(context, urls, guard)
            kept += guard.kept
        if count:
            await context.store.multi([(await self.begun()).put(objects=count)])
        return _shortened([f"the table still names {each}" for each in kept])

    async def _guard(self, folder: str) -> _TableNames:
        from dlcore.log.cold.table_format import app_id_of
        from dlcore.log.cold.tables import forms_in, table_at

        objects, names = self._context.cold.objects, set[str]()
        app_id = app_id_of(self._context.cluster_id, self._log.log_id)
        for form in await forms_in(objects, folder):
            seen = await table_at(form, folder, app_id, objects).look()
            names |= {f"{folder}/{each.name}" for each in (() if seen is None else seen.files)}
        return _TableNames(names)

    # Bookies

    async def ask(self) -> Sequence[str]:
        """Ask all bookies to erase, once the ledgers are gone; return those that have not yet."""
        begun = await self.begun()
        stored = begun.stored
        if await self._undropped(stored.ledgers):
            return ("bookies are asked once these ledgers are deleted",)
        token = f"{stored.token}-{len(stored.ledgers)}"  # more ledgers make another request
        if not await self._request(begun, token):
            return ("another client goes on with the same redaction",)
        for name in await self._requests(stored.token):
            if name != token:
                await self._withdraw(name)
        return await self._unanswered(token)

    async def _request(self, begun: VersionedRedaction, token: str) -> bool:
        """Make the request unless it exists; return False if the redaction is no longer as read.

        The redaction gets another version with it.  A client that finishes the redaction meanwhile
        then looks again.  Without that it would leave this request, which no client withdraws then.
        """
        context, path = self._context, self._context.paths.erasure(token)
        if await persistently(lambda: context.store.get(path, fresh=True)) is not None:
            return True
        request = Erasure(ledgers=begun.stored.ledgers, asked_ms=context.clock.now_ms())
        with contextlib.suppress(NodeExistsError):
            await context.store.create(context.paths.erasures, make_parents=True)
        try:
            await context.store.multi([begun.put(), Create(path, encode(request))])
        except CONFLICTS:
            return False
        return True

    async def _requests(self, token: str) -> list[str]:
        paths, store = self._context.paths, self._context.store
        names = await persistently(lambda: store.get_children(paths.erasures, fresh=True))
        return [each for each in map(unescape, names or ()) if each.startswith(f"{token}-")]

    async def _unanswered(self, token: str) -> list[str]:
        context = self._context
        paths, store = context.paths, context.store
        cookies = await persistently(lambda: store.get_children(paths.cookies, fresh=True)) or []
        names = [unescape(each) for each in cookies]
        wanted = [paths.cookie(each) for each in names]
        answers = [paths.erasure_at(token, each) for each in names]
        nodes = await persistently(lambda: store.get_many([*wanted, *answers], fresh=True))
        running = {each.bookie.name for each in await context.registry.get_bookies()}
        left = []
        for index, name in enumerate(names):
            cookie, answer = nodes[index], nodes[len(names) + index]
            if cookie is None:
                continue  # it was decommissioned just now
            known = decode(BookieCookie, cookie.value, source=wanted[index])
            erased = None if answer is None else decode(Erased, answer.value, source=answers[index])
            # The answer of an earlier incarnation says nothing of the folder that the bookie has
            # now.
            if erased is None or erased.incarnation != known.incarnation:
                left.append(
                    f"bookie {name} has not answered yet"
                    if name in running
                    else f"bookie {name} is down, and erases when it is back"
                )
            elif erased.waits:
                left.append(f"bookie {name}: {erased.waits}")
        return left

    async def _withdraw(self, token: str) -> None:
        path = self._context.paths.erasure(token)
        for each in (*await self._answers(path), path):
            with contextlib.suppress(NoNodeError):
                await persistently(lambda each=each: self._context.store.delete(each))  # type: ignore[misc]

    async def _answers(self, request: str) -> list[str]:
        store = self._context.store
        names = await persistently(lambda: store.get_children(request, fresh=True))
        return [f"{request}/{each}" for each in names or ()]

    async def finish(self) -> None:
        """Remove the redaction's node with its requests to bookies: all at once, or nothing."""
        context = self._context
        while (found := await self.read()) is not None:
            requests = [
                context.paths.erasure(each) for each in await self._requests(found.stored.token)
            ]
            answers = [path for each in requests for path in await self._answers(each)]
            removal = [Delete(each) for each in (*answers, *requests)]
            removal.append(Delete(found.path, found.version))
            # A bookie has answered again, or another client has asked or removed them: look again.
            with contextlib.suppress(NodeNotEmptyError, *CONFLICTS):
                await persistently(lambda removal=removal: context.store.multi(removal))  # type: ignore[misc]


class _TableNames:
    """Keeps the objects that a table names."""

    def __init__(self, urls: set[str]) -> None:
        self._urls = urls
        self.kept: list[str] = []

    async def keeps(self, url: str) -> bool:
        """Return whether the table names an object."""
        if url in self._urls:
            self.kept.append(url)
            return True
        return False


def _shortened(sentences: Sequence[str]) -> list[str]:
    if len(sentences) <= _SHOWN_MAX:
        return list(sentences)
    return [*sentences[:_SHOWN_MAX], f"and {len(sentences) - _SHOWN_MAX} more of this kind"]
