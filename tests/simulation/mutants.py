"""Known bugs of systems like this one, put back on purpose: the simulation must find each of them.

Each mutant is a context manager that changes one rule for as long as it is open.  The numbers are
those of BookKeeper's issues.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bookie.storage import LedgerStorage
from dlcore.errors import DLError, LedgerFencedError, MetadataVersionError, NoSuchEntryError
from dlcore.ledger import recoverer as recoverer_module, recovery as recovery_module
from dlcore.ledger.append import CompleteAdds, Effect, LedgerAppender
from dlcore.ledger.digest import decode_frame
from dlcore.ledger.metadata import LedgerMetadata, LedgerState
from dlcore.ledger.recoverer import _Recoverer
from dlcore.ledger.recovery import LedgerRecovery
from tests.simulation.processes import SimBookie, SimBookieClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.ids import BookieId
    from dlcore.ledger.services import LedgerServices
    from dlcore.ledger.store import VersionedLedger


@contextlib.contextmanager
def negative_answers_before_the_fence_is_durable() -> Iterator[None]:
    """Still in BookKeeper: "no such entry" is answered while the fence is on its way to disk."""

    class Hasty(LedgerStorage):
        async def read_lac(self, ledger_id: int, *, fence: bool) -> int:
            if fence and self._reader.find_all(ledger_id, range(1000), bytes_max=1) == []:
                self._fence_soon(ledger_id)
                return self._ledger(ledger_id).last_add_confirmed
            return await super().read_lac(ledger_id, fence=fence)

        async def read_entry(self, ledger_id: int, entry_id: int, *, fence: bool) -> memoryview:
            if fence and self._reader.find(ledger_id, entry_id) is None:
                self._fence_soon(ledger_id)
                raise NoSuchEntryError("not held, and the fence is not durable yet")
            return await super().read_entry(ledger_id, entry_id, fence=fence)

        def _fence_soon(self, ledger_id: int) -> None:
            state = self._ledger(ledger_id)
            if not state.fenced:
                self._log.append_fence(ledger_id)
                state.fenced = True

    with patch.object(SimBookie, "storage_class", Hasty):
        yield


@contextlib.contextmanager
def acks_during_an_ensemble_change() -> Iterator[None]:
    """#1591, #4651: entries are acknowledged while the change is not in the metadata yet."""
    confirm = LedgerAppender._confirm

    def hasty(self: LedgerAppender) -> list[Effect]:
        planned, self._planned = self._planned, None
        effects = confirm(self)
        self._planned = planned
        return effects

    with patch.object(LedgerAppender, "_confirm", hasty):
        yield


@contextlib.contextmanager
def recovery_reads_do_not_fence() -> Iterator[None]:
    """#2614: only the LAC read fences, so a bookie may say no and then accept the entry."""
    read_entry = SimBookieClient.read_entry

    async def lax(
        self: SimBookieClient, bookie: BookieId, *, ledger_id: int, entry_id: int, fence: bool
    ) -> bytes | memoryview:
        return await read_entry(self, bookie, ledger_id=ledger_id, entry_id=entry_id, fence=False)

    with patch.object(SimBookieClient, "read_entry", lax):
        yield


@contextlib.contextmanager
def recovery_takes_errors_for_noes() -> Iterator[None]:
    """#2908 and others: an answer that is unknown counts as "no such entry"."""

    def guess(
        self: LedgerRecovery, *, entry_id: int, position: int, error: DLError
    ) -> list[recovery_module.Effect]:
        return self.missing(entry_id=entry_id, position=position)

    with patch.object(LedgerRecovery, "unknown", guess):
        yield


@contextlib.contextmanager
def recovery_stores_its_ensembles() -> Iterator[None]:
    """BOOKKEEPER-355: bookies that recovery added are asked by the next recoverer."""
    start = _Recoverer._start_write_back

    def start_persisting(self: _Recoverer, last_add_confirmed: int) -> None:
        start(self, last_add_confirmed)
        assert self._writer is not None
        self._writer.appender._persist = True

    async def store_end(
        pinned: VersionedLedger,
        *,
        recovered: LedgerMetadata,
        last_entry_id: int,
        length_bytes: int,
        services: LedgerServices,
    ) -> LedgerMetadata:
        while True:
            stored = await services.ledgers.read(recovered.ledger_id)
            if stored.metadata.state is LedgerState.CLOSED:
                return stored.metadata
            closed = replace(stored.metadata, ensembles=recovered.ensembles).closed(
                last_entry_id=last_entry_id, length_bytes=length_bytes
            )
            with contextlib.suppress(MetadataVersionError):
                await services.ledgers.write(closed, version=stored.version)
                return closed

    with (
        patch.object(_Recoverer, "_start_write_back", start_persisting),
        patch.object(recoverer_module, "_store_end", store_end),
    ):
        yield


@contextlib.contextmanager
def recovery_starts_at_the_lac_alone() -> Iterator[None]:
    """#2615: the last ensemble's first entry is not considered where recovery starts."""
    after = LedgerRecovery._after_fence_answer

    def forgetful(self: LedgerRecovery) -> list[recovery_module.Effect]:
        first = self._ensemble
        self._ensemble = replace(first, first_entry_id=0)
        effects = after(self)
        self._ensemble = first
        return effects

    with patch.object(LedgerRecovery, "_after_fence_answer", forgetful):
        yield


@contextlib.contextmanager
def one_no_ends_the_ledger() -> Iterator[None]:
    """The end is believed after one "no" where Qw - Qa + 1 are needed."""
    missing = LedgerRecovery.missing

    def gullible(
        self: LedgerRecovery, *, entry_id: int, position: int
    ) -> list[recovery_module.Effect]:
        effects: list[recovery_module.Effect] = []
        for each in range(self._quorum.write_quorum_size):
            effects += missing(self, entry_id=entry_id, position=(entry_id + each) % 100)
        return effects

    with patch.object(LedgerRecovery, "missing", gullible):
        yield


@contextlib.contextmanager
def the_writer_ignores_fences() -> Iterator[None]:
    """A refusal because of fencing is treated like any failed bookie."""
    add_failed = LedgerAppender.add_failed

    def stubborn(self: LedgerAppender, *, error: DLError, **add: Any) -> list[Effect]:
        if isinstance(error, LedgerFencedError):
            error = DLError("refused")
        return add_failed(self, error=error, **add)

    reread = LedgerAppender.metadata_reread

    def overwrite(self: LedgerAppender, metadata: LedgerMetadata) -> list[Effect]:
        return reread(self, replace(metadata, state=LedgerState.OPEN))

    with (
        patch.object(LedgerAppender, "add_failed", stubborn),
        patch.object(LedgerAppender, "metadata_reread", overwrite),
    ):
        yield


@contextlib.contextmanager
def acks_before_earlier_entries() -> Iterator[None]:
    """An entry is acknowledged as soon as it has its own quorum."""

    def eager(self: LedgerAppender) -> list[Effect]:
        if self._planned is not None:
            return []
        needed = self.metadata.quorum.ack_quorum_size
        ready = [add for add in self._unconfirmed() if len(add.acks) >= needed]
        if not ready:
            return []
        first, self.last_add_confirmed = self.last_add_confirmed + 1, ready[-1].entry_id
        self.confirmed_bytes = ready[-1].ledger_bytes
        return [CompleteAdds(first_entry_id=first, last_entry_id=self.last_add_confirmed)]

    with patch.object(LedgerAppender, "_confirm", eager):
        yield


@contextlib.contextmanager
def replaced_bookies_get_nothing_again() -> Iterator[None]:
    """After an ensemble change what is unconfirmed is not sent to the new bookie."""
    change_stored = LedgerAppender.change_stored
    send = LedgerAppender._send

    def forgetful(self: LedgerAppender, metadata: LedgerMetadata) -> list[Effect]:
        with patch.object(LedgerAppender, "_send", lambda *_: []):
            acks = {add.entry_id: set(add.acks) for add in self._adds.values()}
            with patch.object(LedgerAppender, "_confirm", lambda _: []):
                effects = change_stored(self, metadata)
            for add in self._adds.values():
                add.acks |= acks[add.entry_id]
        return effects + self._confirm()

    assert send is LedgerAppender._send
    with patch.object(LedgerAppender, "change_stored", forgetful):
        yield


@contextlib.contextmanager
def bookies_answer_before_they_sync() -> Iterator[None]:
    """An add is acknowledged when it is in the page cache."""

    def serve_hastily(add: Callable[..., Any]) -> Callable[..., Any]:
        def serve_add(self: SimBookie, client: str, frame: bytes, reply: Any, **how: Any) -> None:
            answered = False

            def once(result: object) -> None:
                nonlocal answered
                if not answered:
                    answered = True
                    reply(result)

            storage = self.storage
            if storage is not None and storage.state.value == "writable":
                entry = decode_frame(frame)
                state = storage._ledgers.get(entry.ledger_id)
                if state is None or state.accepts(is_recovery=how["is_recovery"]):
                    self.acknowledged.add((entry.ledger_id, entry.entry_id))
                    self._network.send(self.name, client, lambda: once(None))
            add(self, client, frame, once, **how)

        return serve_add

    with patch.object(SimBookie, "serve_add", serve_hastily(SimBookie.serve_add)):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    mutant.__name__: mutant
    for mutant in (
        negative_answers_before_the_fence_is_durable,
        acks_during_an_ensemble_change,
        recovery_reads_do_not_fence,
        recovery_takes_errors_for_noes,
        recovery_stores_its_ensembles,
        recovery_starts_at_the_lac_alone,
        one_no_ends_the_ledger,
        the_writer_ignores_fences,
        acks_before_earlier_entries,
        replaced_bookies_get_nothing_again,
        bookies_answer_before_they_sync,
    )
}
