"""The second part of a run: everything has healed, and whatever was promised is asked for."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.errors import BookieStorageError, DLError, LedgerNotFoundError, LedgerReadError
from dlcore.wire.frames import decode_frame
from tests.fixtures.storage import read_entries
from tests.simulation.checkers import BOUNDED, LIVE, NO_FALSE_NO
from tests.simulation.truth import InvariantViolatedError, is_no

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bookie.ledger_storage import LedgerStorage
    from tests.simulation.clients import SimClient
    from tests.simulation.logs import Logs
    from tests.simulation.processes import SimBookie
    from tests.simulation.world import World

_POLL_S = 0.5
_AUDIT_CHUNK_BYTES = 1 << 20


class Judgement:
    """Brings everything back, then asks clients and bookies for what they owe."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._missing = ""

    async def pass_on(self, writers: Sequence[SimClient], logs: Logs | None) -> None:
        """Judge the run.

        Raises:
            InvariantViolatedError: a promise was broken.
        """
        world = self._world
        await asyncio.gather(*(self._bring_back(bookie) for bookie in world.bookies))
        self._note("all bookies are up; waiting for writers")
        for client in writers:
            if client.is_alive and client.tasks:
                await asyncio.wait(list(client.tasks))
        if logs is not None:
            self._note("waiting for users of logs")
            await logs.finish()
        self._note("closing ledgers")
        final = world.new_client("final")
        for ledger_id in world.checkers.live_ledgers():
            await self._close(final, ledger_id)
        for ledger_id in world.checkers.live_ledgers():
            await self._read_whole(final, ledger_id)
        self._note("all is read; waiting for followers and recoverers")
        await self._finish_company()
        self._note("waiting for garbage collection")
        await self._finish_collection()
        if world.plan.auto_recoveries:
            self._note("waiting for lost replicas")
            world.start_auto_recovery("recovery-final")  # the others may have died
            await _until(self._is_replicated)
        self._note("asking every bookie for what it acknowledged")
        for bookie in world.bookies:
            await self._audit(bookie)
        world.checkers.check_all()
        await self._end()

    async def _bring_back(self, bookie: SimBookie) -> None:
        """Start a bookie; one that refuses to start with what it has starts anew and empty."""
        bookie.is_kept_down = False
        while bookie.storage is None:
            if bookie.refusal and not bookie.is_without_its_disk:
                bookie.replace_disk()
            if bookie.is_without_its_disk:
                bookie.forget_identity()
            await bookie.start()
            if bookie.storage is None:
                await asyncio.sleep(_POLL_S)

    async def _close(self, final: SimClient, ledger_id: int) -> None:
        world = self._world
        while not world.checkers.is_deleted(ledger_id):
            try:
                metadata = await final.ledgers.recover_ledger(ledger_id)
            except DLError as error:
                # Bookies may just be coming back; the budget of virtual time ends this.
                world.trace.note(
                    final.name, f"{type(error).__name__}: {error}", ledger_id=ledger_id
                )
                await asyncio.sleep(1.0)
            else:
                world.checkers.on_closed(metadata)
                return

    async def _read_whole(self, client: SimClient, ledger_id: int) -> None:
        checkers = self._world.checkers
        delivered = checkers.new_delivery(ledger_id)
        failure = ""
        try:
            reader = await client.ledgers.open_ledger(ledger_id)
            async for frames in reader.read(0, reader.metadata.last_entry_id):
                checkers.on_delivered(ledger_id, delivered, frames)
        except (LedgerReadError, LedgerNotFoundError) as error:
            failure = str(error)
        if not checkers.is_deleted(ledger_id):
            checkers.on_read_whole(ledger_id, delivered, failure)

    async def _finish_company(self) -> None:
        """Followers and recoverers learn the end of a closed ledger by themselves."""
        for client in self._world.clients:
            is_one = client.name.startswith(("follower", "recoverer"))
            if is_one and client.is_alive and client.tasks:
                await asyncio.wait(list(client.tasks))

    async def _finish_collection(self) -> None:
        """Bookies that collect garbage forget deleted ledgers in the end."""
        world = self._world
        live = set(world.log_checkers.ledgers())
        if world.plan.maintenance_interval_s == 0:
            return
        for bookie in world.bookies:
            await _until(partial(_has_forgotten, bookie, live))

    def _is_replicated(self) -> bool:
        """I8: every entry of every ledger is held by its whole write set, and they all live."""
        world = self._world
        live = {each.bookie: each for each in world.bookies if each.storage is not None}
        for ledger_id in world.checkers.live_ledgers():
            metadata = world.checkers.stored(ledger_id)
            if metadata.write_quorum_size < metadata.wanted_copies:
                self._miss(f"{ledger_id} has {metadata.write_quorum_size} copies")
                return False
            for entry_id in range(metadata.last_entry_id + 1):
                for member in metadata.members_of(entry_id):
                    bookie = live.get(member)
                    if bookie is None or not _holds(bookie, ledger_id, entry_id):
                        self._miss(f"{ledger_id}:{entry_id} on {member}")
                        return False
        return True

    def _note(self, what: str) -> None:
        self._world.trace.note("judgement", what)

    def _miss(self, replica: str) -> None:
        """Tell of a replica that is not there, once."""
        if replica != self._missing:
            self._missing = replica
            self._note(f"misses {replica}")

    async def _audit(self, bookie: SimBookie) -> None:
        """I7: a bookie still has, by itself, all that it ever acknowledged."""
        world, storage, record = self._world, bookie.storage, bookie.record
        if storage is None or record is None:
            raise InvariantViolatedError(LIVE, f"{bookie.name} is down")
        for ledger_id in world.checkers.live_ledgers():
            held = sorted(record.held(ledger_id))
            if not held or record.is_exempt(ledger_id):
                continue
            try:
                await self._audit_ledger(storage, ledger_id, held)
            except DLError as error:
                if (
                    not bookie.is_damaged
                    or is_no(error)
                    or not isinstance(error, BookieStorageError)
                ):
                    raise InvariantViolatedError(
                        NO_FALSE_NO,
                        f"{bookie.name} acknowledged {held} of ledger {ledger_id}: {error}",
                        ledger_id=ledger_id,
                    ) from error

    async def _audit_ledger(
        self, storage: LedgerStorage, ledger_id: int, held: Sequence[int]
    ) -> None:
        found: dict[int, bytes] = {}
        for each in storage.reads.list_entries(ledger_id):
            async for frames in read_entries(
                storage,
                ledger_id,
                first_entry_id=each.first_entry_id,
                last_entry_id=each.last_entry_id,
                chunk_bytes=_AUDIT_CHUNK_BYTES,
            ):
                entries = [decode_frame(frame) for frame in frames]
                found.update((entry.entry_id, bytes(entry.body)) for entry in entries)
        bodies = self._world.checkers.appended(ledger_id)
        for entry_id in held:
            if found.get(entry_id) != bodies[entry_id]:
                raise InvariantViolatedError(
                    NO_FALSE_NO,
                    f"{storage} lost {ledger_id}:{entry_id}, or changed it",
                    ledger_id=ledger_id,
                    entry_id=entry_id,
                )

    async def _end(self) -> None:
        """I9: once all clients are gone, nothing waits for them, and nothing stays open."""
        for client in self._world.clients:
            await client.aclose()
        await asyncio.sleep(_POLL_S)  # for messages under way
        for bookie in self._world.bookies:
            storage = bookie.storage
            assert storage is not None
            await _until(partial(_is_idle, bookie))
            followed = list(storage.followers.ledgers())
            await bookie.aclose()
            files = bookie.disk.open_files
            if followed or files:
                raise InvariantViolatedError(
                    BOUNDED,
                    f"{bookie.name} ends with followers of {followed} and {files} open files",
                )


def _holds(bookie: SimBookie, ledger_id: int, entry_id: int) -> bool:
    if (ledger_id, entry_id) in bookie.acknowledged:
        return True
    if bookie.storage is None:
        return False
    try:
        return any(
            each.first_entry_id <= entry_id <= each.last_entry_id
            for each in bookie.storage.reads.list_entries(ledger_id)
        )
    except DLError:
        return False


def _has_forgotten(bookie: SimBookie, live: set[int]) -> bool:
    return bookie.storage is not None and not set(bookie.storage.core.live_ledgers()) - live


def _is_idle(bookie: SimBookie) -> bool:
    storage = bookie.storage
    is_quiet = not bookie.adds_in_flight and not (bookie.listener and bookie.listener.is_read_from)
    return storage is not None and is_quiet and not storage.core.log.commits.queue.pending_bytes


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the budget of virtual time ends a wait that is in vain."""
    while True:
        if condition():
            return
        await asyncio.sleep(_POLL_S)


def check_no_task_is_left() -> None:
    """I9: processes that ended left no task behind."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        names = sorted(str(task.get_coro()) for task in left)
        raise InvariantViolatedError(BOUNDED, f"{len(names)} tasks are left: {names[:3]}")
