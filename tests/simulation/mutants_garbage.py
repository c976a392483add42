"""Bugs of garbage collection and of the dealings with the metadata store, put back on purpose."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bookie.files.sealed_files import SealedFiles
from bookie.membership.given_ids import GivenIds, Need
from bookie.upkeep.garbage import GarbageJudge, GarbageVerdict
from bookie.upkeep.garbage_collector import GarbageCollector
from dlcore.base.errors import (
    BadRequestError,
    LedgerExistsError,
    MetadataConnectionError,
    MetadataVersionError,
)
from dlcore.ledger.metadata.store import LedgerStore, VersionedLedger
from dlcore.metadata.stored import encode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from bookie.files.entry_log import EntryLog, GroupCommit
    from dlcore.ledger.metadata.values import LedgerMetadata


@contextlib.contextmanager
def one_look_proves_a_deletion() -> Iterator[None]:
    """#870, #876: what one listing leaves out is deleted at once."""

    def judge(
        _: GarbageJudge, *, looks_deleted: Collection[int], **_more: object
    ) -> GarbageVerdict:
        return GarbageVerdict(deleted=frozenset(looks_deleted), held="")

    async def look_once(self: GarbageCollector, ledger_id: int) -> bool:
        return await self._store.get(self._paths.ledger(ledger_id)) is None

    with (
        patch.object(GarbageJudge, "judge", judge),
        patch.object(GarbageCollector, "_is_unneeded", look_once),
        patch.object(GarbageCollector, "_confirm", lambda *_: contextlib.nullcontext(True)),
    ):
        yield


@contextlib.contextmanager
def files_are_dropped_with_their_first_ledger() -> Iterator[None]:
    """#4607, #950: a file goes when one of its ledgers is deleted, not when all are."""

    async def early(self: SealedFiles) -> dict[int, int]:
        deleted = [each for each, state in self._ledgers.items() if state.is_deleted]
        numbers = {number for each in deleted for number in self._ledgers[each].files()}
        for state in self._ledgers.values():
            state.forget_files(numbers)
        return await self.drop(numbers, deleted)

    with patch.object(SealedFiles, "drop_dead", early):
        yield


@contextlib.contextmanager
def files_are_deleted_before_that_is_durable() -> Iterator[None]:
    """Section 4.6: a crash between the deletion and its record leaves files missing."""
    drop = SealedFiles.drop

    class Unflushed:
        def __init__(self, commits: GroupCommit) -> None:
            self._commits = commits

        def __getattr__(self, name: str) -> Any:
            return getattr(self._commits, name)

        async def flush(self) -> None:
            """Leave that to the next batch."""

    class Early:
        def __init__(self, log: EntryLog) -> None:
            self._log = log
            self.commits = Unflushed(log.commits)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._log, name)

    async def early(
        self: SealedFiles, numbers: Collection[int], ledger_ids: Iterable[int]
    ) -> dict[int, int]:
        log = self._log
        with patch.object(self, "_log", Early(log)):
            return await drop(self, numbers, ledger_ids)

    with patch.object(SealedFiles, "drop", early):
        yield


@contextlib.contextmanager
def metadata_is_overwritten() -> Iterator[None]:
    """BOOKKEEPER-584: a write that lost is done again over whatever is there."""
    write = LedgerStore.write

    async def blind(self: LedgerStore, metadata: LedgerMetadata, *, version: int) -> int:
        while True:
            try:
                return await write(self, metadata, version=version)
            except MetadataVersionError:
                version = (await self.read(metadata.ledger_id)).version

    with patch.object(LedgerStore, "write", blind):
        yield


@contextlib.contextmanager
def lost_replies_count_as_success() -> Iterator[None]:
    """Section 3.4: a write whose reply is lost is taken for one that was applied."""

    async def hopeful(self: LedgerStore, metadata: LedgerMetadata, *, version: int) -> int:
        path = self._paths.ledger(metadata.ledger_id)
        try:
            return await self._store.put(path, encode(metadata), version=version)
        except MetadataConnectionError:
            return version + 1

    with patch.object(LedgerStore, "write", hopeful):
        yield


@contextlib.contextmanager
def files_without_entries_are_garbage() -> Iterator[None]:
    """BOOKKEEPER-815: a file that holds nothing but fences and LACs is dropped."""
    drop_dead = SealedFiles.drop_dead

    async def early(self: SealedFiles) -> dict[int, int]:
        empty = {load.number for load in await self.loads() if load.live_bytes == 0}
        for state in self._ledgers.values():
            state.forget_files(empty)
        return await drop_dead(self)

    with patch.object(SealedFiles, "drop_dead", early):
        yield


@contextlib.contextmanager
def ids_are_used_twice() -> Iterator[None]:
    """A lost reply counts as success: of who took an id, and of who created its ledger."""
    create = LedgerStore.create

    async def take(self: LedgerStore) -> int:
        path = self._paths.ledger_idgen
        node = await self._store.get(path)
        assert node is not None
        with contextlib.suppress(MetadataConnectionError):
            await self._store.put(path, b"%d" % (int(node.value) + 1), version=node.version)
        return int(node.value)

    async def adopt(self: LedgerStore, metadata: LedgerMetadata, **more: Any) -> VersionedLedger:
        try:
            return await create(self, metadata, **more)
        except LedgerExistsError:
            return VersionedLedger(metadata, 0)

    with (
        patch.object(LedgerStore, "new_ledger_id", take),
        patch.object(LedgerStore, "create", adopt),
    ):
        yield


@contextlib.contextmanager
def any_ledger_id_is_believed() -> Iterator[None]:
    """One fence with an id that no one was given ends garbage collection for good."""
    with patch.object(GivenIds, "covers", lambda *_: True):
        yield


@contextlib.contextmanager
def new_ledgers_are_judged_by_an_old_look() -> Iterator[None]:
    """An id above those that were given at the last look is refused without another."""
    ask = GivenIds.ask

    def early(self: GivenIds, ledger_id: int, need: Need) -> asyncio.Future[None]:
        if not self._next_id or ledger_id < self._next_id:
            return ask(self, ledger_id, need)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.set_exception(BadRequestError(f"ledger {ledger_id} was never created"))
        return answer

    with patch.object(GivenIds, "ask", early):
        yield


@contextlib.contextmanager
def new_ledgers_are_judged_without_sync() -> Iterator[None]:
    """The next id is read from a server that is behind the one that gave it."""

    async def read(self: LedgerStore) -> int:
        node = await self._store.get(self._paths.ledger_idgen)
        assert node is not None
        return int(node.value)

    with patch.object(LedgerStore, "next_ledger_id", read):
        yield


MUTANTS = (
    any_ledger_id_is_believed,
    files_are_deleted_before_that_is_durable,
    files_are_dropped_with_their_first_ledger,
    files_without_entries_are_garbage,
    ids_are_used_twice,
    lost_replies_count_as_success,
    metadata_is_overwritten,
    new_ledgers_are_judged_by_an_old_look,
    new_ledgers_are_judged_without_sync,
    one_look_proves_a_deletion,
)
