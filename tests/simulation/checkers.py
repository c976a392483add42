"""Invariants of every run, judged by the checkers' own record, never by what clients believe.

Invariants are numbered as in the list that the project promises (I1 … I9); the second word is the
name in the TLA+ specification of BookKeeper's protocol, where there is one.  Promises of single
bookies are judged in `truth.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dlcore.metadata.port import Delete
from tests.simulation.log_checkers import LOG_INVARIANTS
from tests.simulation.proxy_checkers import PROXY_INVARIANTS
from tests.simulation.sink_checkers import SINK_INVARIANTS
from tests.simulation.stored_ledger import CLOSED, IN_RECOVERY, STATES, StoredLedger, read_ledger
from tests.simulation.truth import BookieRecord, InvariantViolatedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import Op
    from dlcore.wire.frames import EntryFrame
    from tests.fixtures.simulated_store import SimulatedTree
    from tests.simulation.trace import Trace

READABLE = "I1 AllAckedEntriesAreReadable"
SAME_END = "I2 NoDivergenceBetweenClientAndMetadata"
CLEAN_READS = "I3 NoDirtyReads"
IN_ORDER = "I4 NoOutOfOrderEntries"
FENCED = "I5 NoAckAfterFence"
QUORUM = "I6 AllCommittedEntriesReachAckQuorum"
NAMED = "I6 EnsemblesNameHolders"
NO_FALSE_NO = "I7 NoFalseNo"
LIVE = "I8 LiveAfterHealing"
BOUNDED = "I9 ResourcesAreBounded"
LINEAR = "I10 LinearizableReads"
INVARIANTS = (
    READABLE,
    SAME_END,
    CLEAN_READS,
    IN_ORDER,
    FENCED,
    QUORUM,
    NAMED,
    NO_FALSE_NO,
    LIVE,
    BOUNDED,
    LINEAR,
    *LOG_INVARIANTS,
    *PROXY_INVARIANTS,
    *SINK_INVARIANTS,
)


@dataclass(slots=True)
class _History:
    """One ledger: what was appended, acknowledged, and found at its end."""

    bodies: list[bytes] = field(default_factory=list)
    acked: int = -1
    end: tuple[int, int] | None = None
    metadata: StoredLedger | None = None
    appended_at_coverage: int | None = None
    delivered: list[list[bytes]] = field(default_factory=list)
    shown: int = -1
    """The last entry that any reader was shown, or learned that it may read."""
    is_deleted: bool = False


class Checkers:
    """Records a run and judges it as it goes."""

    def __init__(
        self,
        *,
        tree: SimulatedTree,
        paths: NamespacePaths,
        trace: Trace,
        on_violation: Callable[[BaseException], None],
    ) -> None:
        self._tree = tree
        self._paths = paths
        self._trace = trace
        self._on_violation = on_violation
        self._ledgers: dict[int, _History] = {}
        self._ids: dict[str, int] = {}  # by path
        self.records: dict[BookieId, BookieRecord] = {}
        self.acks = 0

    def new_record(self, bookie: BookieId) -> BookieRecord:
        """Start the record of a bookie's identity."""
        record = self.records[bookie] = BookieRecord(
            bookie,
            is_exempt=partial(self._may_forget, bookie),
            on_fenced=partial(self._on_fenced, bookie),
            on_violation=self._on_violation,
        )
        return record

    def _may_forget(self, bookie: BookieId, ledger_id: int) -> bool:
        """Return whether the ledger is deleted, or closed without naming the bookie."""
        node = self._tree._find(self._paths.ledger(ledger_id))
        if node is None:
            return True
        metadata = read_ledger(node.value)
        if metadata.state != CLOSED:
            return False
        return all(bookie not in each.bookies for each in metadata.ensembles)

    def is_deleted(self, ledger_id: int) -> bool:
        """Return whether the ledger's metadata was deleted."""
        history = self._ledgers.get(ledger_id)
        return history is not None and history.is_deleted

    def live_ledgers(self) -> list[int]:
        """Return the ledgers that were made and not deleted."""
        return [each for each, history in self._ledgers.items() if not history.is_deleted]

    def appended(self, ledger_id: int) -> list[bytes]:
        """Return what was appended to the ledger."""
        return self._ledgers[ledger_id].bodies

    def stored(self, ledger_id: int) -> StoredLedger:
        """Return the metadata as it is stored right now."""
        node = self._tree._find(self._paths.ledger(ledger_id))
        assert node is not None
        return read_ledger(node.value)

    def fenced_bookies(self, ledger_id: int) -> set[BookieId]:
        """Return the bookies that ever reported to a client that they fenced the ledger."""
        return {bookie for bookie, each in self.records.items() if ledger_id in each.fenced}

    def _require(
        self,
        name: str,
        *,
        holds: bool,
        message: str,
        ledger_id: int,
        entry_id: int | None = None,
    ) -> None:
        if not holds:
            raise InvariantViolatedError(name, message, ledger_id=ledger_id, entry_id=entry_id)

    # The writer's side

    def on_created(self, ledger_id: int) -> None:
        """A client got the answer that it made a ledger: no other one ever did, for that id."""
        self._require(
            SAME_END,
            holds=ledger_id not in self._ledgers,
            message=f"ledger {ledger_id} was made twice",
            ledger_id=ledger_id,
        )
        history = self._ledgers[ledger_id] = _History()
        self._ids[self._paths.ledger(ledger_id)] = ledger_id
        history.metadata = self.stored(ledger_id)

    def on_append(self, ledger_id: int, body: bytes) -> None:
        """The only writer appended `body`: it is the entry after the one before."""
        self._ledgers[ledger_id].bodies.append(body)

    def on_ack(self, ledger_id: int, entry_id: int) -> None:
        """The writer learned that the entry is safe."""
        history = self._ledgers[ledger_id]
        self.acks += 1
        about = {"ledger_id": ledger_id, "entry_id": entry_id}
        self._require(
            IN_ORDER,
            holds=entry_id == history.acked + 1 and entry_id < len(history.bodies),
            message=f"{ledger_id}:{entry_id} acknowledged after {history.acked}",
            **about,
        )
        history.acked = entry_id
        appended = history.appended_at_coverage
        self._require(
            FENCED,
            holds=appended is None or entry_id < appended,
            message=f"{ledger_id}:{entry_id} was appended after the fence, and acknowledged",
            **about,
        )
        if history.is_deleted:
            return
        metadata = self.stored(ledger_id)
        self._check_quorum(metadata, entry_id)
        self._check_end(metadata)

    # Metadata and bookies

    def on_metadata(self, op: Op) -> None:
        """The store just applied `op`: what was acknowledged before must still be held."""
        ledger_id = self._ids.get(op.path)
        if ledger_id is None:
            return
        history = self._ledgers[ledger_id]
        if isinstance(op, Delete):
            history.is_deleted = True
            self._trace.note("metadata", "deleted", ledger_id=ledger_id)
            return
        before, metadata = history.metadata, self.stored(ledger_id)
        history.metadata = metadata
        self._trace.note(
            "metadata", f"{metadata.state} {_ensembles(metadata)}", ledger_id=ledger_id
        )
        self._check_state(before, metadata)
        self._check_end(metadata)
        # Entries of a closed ledger are committed, though its writer may not have heard of it.
        for entry_id in range(max(history.acked, metadata.last_entry_id) + 1):
            self._check_quorum(metadata, entry_id)
        if before is not None:
            self._check_named(before, metadata)
        self._note_coverage(ledger_id, metadata)

    def _check_state(self, before: StoredLedger | None, after: StoredLedger) -> None:
        """A closed ledger stays closed, and one that is recovered is never written again."""
        self._require(
            SAME_END,
            holds=before is None or STATES.index(before.state) <= STATES.index(after.state),
            message=f"ledger {after.ledger_id} is {after.state} again",
            ledger_id=after.ledger_id,
        )

    def _check_quorum(self, metadata: StoredLedger, entry_id: int) -> None:
        """Qa members of the entry's write set have ever called it durable."""
        members = metadata.members_of(entry_id)
        entry = (metadata.ledger_id, entry_id)
        holders = [each for each in members if self._ever_held(each, entry)]
        if len(holders) < metadata.ack_quorum_size:
            raise InvariantViolatedError(
                QUORUM,
                f"{metadata.ledger_id}:{entry_id} is committed, and of its write set "
                f"{[each.name for each in members]} only {[each.name for each in holders]} "
                "ever held it",
                ledger_id=metadata.ledger_id,
                entry_id=entry_id,
            )

    def _ever_held(self, bookie: BookieId, entry: tuple[int, int]) -> bool:
        record = self.records.get(bookie)
        return record is not None and entry in record.acknowledged

    def _check_named(self, before: StoredLedger, after: StoredLedger) -> None:
        """A bookie that replaces one of complete entries must hold them already."""
        complete = [each.first_entry_id - 1 for each in after.ensembles[1:]]
        complete.append(after.last_entry_id if before.state == CLOSED else -1)
        growing_from = before.ensembles[-1].first_entry_id
        for ensemble, last_entry_id in zip(after.ensembles, complete, strict=True):
            for entry_id in range(ensemble.first_entry_id, last_entry_id + 1):
                if entry_id >= growing_from and before.state != CLOSED:
                    continue  # its writer or its recovery may still change it
                old = before.bookies_of(entry_id)
                others = len(after.bookies_of(entry_id)) - len(old)  # bookies that joined
                names = [each.name for each in old] + others * ["none"]
                for position in after.positions_of(entry_id):
                    bookie = ensemble.bookies[position]
                    self._require(
                        NAMED,
                        holds=bookie in old[position : position + 1]
                        or self._ever_held(bookie, (after.ledger_id, entry_id)),
                        message=(
                            f"{bookie.name} replaced {names[position]} without "
                            f"{after.ledger_id}:{entry_id}"
                        ),
                        ledger_id=after.ledger_id,
                        entry_id=entry_id,
                    )

    def _on_fenced(self, bookie: BookieId, ledger_id: int) -> None:
        """A bookie fenced a ledger for the first time."""
        self._trace.note(bookie.name, "fenced", ledger_id=ledger_id)
        history = self._ledgers.get(ledger_id)
        if history is not None and history.metadata is not None and not history.is_deleted:
            self._note_coverage(ledger_id, history.metadata)

    def _note_coverage(self, ledger_id: int, metadata: StoredLedger) -> None:
        """Note how much was appended when the fence was complete: nothing after that counts."""
        history = self._ledgers[ledger_id]
        if metadata.state != IN_RECOVERY or history.appended_at_coverage is not None:
            return
        if metadata.is_fenced_by(self.fenced_bookies(ledger_id)):
            history.appended_at_coverage = len(history.bodies)
            self._trace.note("checkers", "the fence is complete", ledger_id=ledger_id)

    def _check_end(self, metadata: StoredLedger) -> None:
        if metadata.state == CLOSED:
            self._check_reported_end(metadata.ledger_id, metadata.end)

    def _check_reported_end(self, ledger_id: int, end: tuple[int, int]) -> None:
        history = self._ledgers[ledger_id]
        last_entry_id, length_bytes = end
        history.end = history.end or end
        self._require(
            SAME_END,
            holds=end == history.end,
            message=f"ledger {ledger_id} ended at {history.end} and then at {end}",
            ledger_id=ledger_id,
        )
        self._require(
            SAME_END,
            holds=history.acked <= last_entry_id < len(history.bodies),
            message=(
                f"ledger {ledger_id} is closed at {last_entry_id}; appended were "
                f"{len(history.bodies)} entries and acknowledged those up to {history.acked}"
            ),
            ledger_id=ledger_id,
        )
        self._require(
            LINEAR,
            holds=history.shown <= last_entry_id,
            message=f"ledger {ledger_id} ends at {last_entry_id}, and {history.shown} was shown",
            ledger_id=ledger_id,
            entry_id=history.shown,
        )
        length = sum(map(len, history.bodies[: last_entry_id + 1]))
        self._require(
            SAME_END,
            holds=length_bytes == length,
            message=f"ledger {ledger_id} has {length_bytes} bytes, not {length}",
            ledger_id=ledger_id,
        )

    # Answers to clients

    def on_closed(self, metadata: LedgerMetadata) -> None:
        """A client learned that the ledger is closed like this."""
        ledger_id, end = metadata.ledger_id, (metadata.last_entry_id, metadata.length_bytes)
        self._check_reported_end(ledger_id, end)
        if self.is_deleted(ledger_id):
            return
        stored = self.stored(ledger_id)
        self._require(
            SAME_END,
            holds=stored.state == CLOSED and stored.end == end,
            message=f"ledger {ledger_id}: {stored.end} is stored ({stored.state}), reported: {end}",
            ledger_id=ledger_id,
        )

    def read_floor(self, ledger_id: int) -> int:
        """Return the entry that a read starting now must see: acknowledged, or shown to anybody."""
        history = self._ledgers[ledger_id]
        return max(history.acked, history.shown)

    def on_end_read(self, ledger_id: int, last_entry_id: int, floor: int) -> None:
        """A reader learned up to where it may read; `floor` is from before it asked."""
        history = self._ledgers[ledger_id]
        self._require(
            LINEAR,
            holds=floor <= last_entry_id,
            message=f"ledger {ledger_id}: {floor} was acknowledged or shown, and the end was read "
            f"as {last_entry_id}",
            ledger_id=ledger_id,
            entry_id=floor,
        )
        history.shown = max(history.shown, last_entry_id)
        end = len(history.bodies) if history.end is None else history.end[0] + 1
        self._require(
            CLEAN_READS,
            holds=last_entry_id < end,
            message=f"ledger {ledger_id}: entry {last_entry_id} of {end} may be read",
            ledger_id=ledger_id,
        )

    def new_delivery(self, ledger_id: int) -> list[bytes]:
        """Return the record of one reader, to be filled by `on_delivered`."""
        delivered: list[bytes] = []
        self._ledgers[ledger_id].delivered.append(delivered)
        return delivered

    def on_delivered(
        self, ledger_id: int, delivered: list[bytes], frames: Sequence[EntryFrame]
    ) -> None:
        """A reader that started at entry 0 got the next entries."""
        history = self._ledgers[ledger_id]
        for frame in frames:
            body = bytes(frame.body)
            entry_id = len(delivered)
            self._require(
                IN_ORDER,
                holds=frame.entry_id == entry_id,
                message=f"{ledger_id}:{frame.entry_id} delivered as entry {entry_id}",
                ledger_id=ledger_id,
                entry_id=entry_id,
            )
            self._require(
                CLEAN_READS,
                holds=entry_id < len(history.bodies) and history.bodies[entry_id] == body,
                message=f"{ledger_id}:{entry_id} delivered with other bytes than were appended",
                ledger_id=ledger_id,
                entry_id=entry_id,
            )
            delivered.append(body)
            history.shown = max(history.shown, entry_id)

    # The end

    def on_read_whole(self, ledger_id: int, delivered: list[bytes], failure: str) -> None:
        """A reader read the closed ledger to its end, after everything healed."""
        history = self._ledgers[ledger_id]
        self._require(
            READABLE,
            holds=len(delivered) > history.acked,
            message=(
                f"ledger {ledger_id}: acknowledged up to {history.acked}, readable are "
                f"{len(delivered)} entries; {failure}"
            ),
            ledger_id=ledger_id,
            entry_id=len(delivered),
        )
        self._require(
            LIVE,
            holds=history.end is not None and len(delivered) == history.end[0] + 1,
            message=(
                f"ledger {ledger_id}: closed at {history.end}, readable are {len(delivered)} "
                f"entries; {failure}"
            ),
            ledger_id=ledger_id,
            entry_id=len(delivered),
        )

    def check_all(self) -> None:
        """Judge the whole run, once every ledger is closed and read again."""
        for ledger_id in self.live_ledgers():
            history = self._ledgers[ledger_id]
            metadata = self.stored(ledger_id)
            self._require(
                LIVE,
                holds=metadata.state == CLOSED,
                message=f"ledger {ledger_id} is {metadata.state}",
                ledger_id=ledger_id,
            )
            self._check_end(metadata)
            for delivered in history.delivered:
                self._require(
                    CLEAN_READS,
                    holds=len(delivered) <= metadata.last_entry_id + 1,
                    message=f"ledger {ledger_id}: a reader got more than the closed ledger holds",
                    ledger_id=ledger_id,
                )


def _ensembles(metadata: StoredLedger) -> str:
    return " ".join(
        f"{ensemble.first_entry_id}:{','.join(each.name for each in ensemble.bookies)}"
        for ensemble in metadata.ensembles
    )
