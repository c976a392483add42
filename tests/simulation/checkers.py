"""What must hold in every run, judged by the checkers' own record, never by what clients believe.

The names are those of the TLA+ specification of BookKeeper's protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlcore.ledger.codec import decode_ledger
from dlcore.ledger.metadata import LedgerMetadata, LedgerState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.ledger.digest import EntryFrame
    from dlcore.metadata.memory import MemoryTree
    from dlcore.metadata.paths import NamespacePaths
    from tests.simulation.processes import SimBookie


class InvariantViolatedError(AssertionError):
    """A promise was broken; the message names which."""


@dataclass(slots=True)
class _History:
    """One ledger: what was appended, acknowledged, and found at its end."""

    bodies: list[bytes] = field(default_factory=list)
    acked: int = -1
    end: tuple[int, int] | None = None
    delivered: list[list[bytes]] = field(default_factory=list)
    published: int = -1


class Checkers:
    """Records a run and judges it as it goes."""

    def __init__(
        self,
        *,
        tree: MemoryTree,
        paths: NamespacePaths,
        bookies: Sequence[SimBookie],
        trace: Callable[[str], None],
    ) -> None:
        self._tree = tree
        self._paths = paths
        self._bookies = bookies
        self._trace = trace
        self._ledgers: dict[int, _History] = {}
        self.has_lost_bookie = False
        self.acks = 0

    def stored(self, ledger_id: int) -> LedgerMetadata:
        """Return the metadata as it is stored right now."""
        return decode_ledger(self._tree.dump()[self._paths.ledger(ledger_id)].value)

    def _require(self, name: str, *, holds: bool, message: str) -> None:
        if not holds:
            self._trace(f"VIOLATED {name}: {message}")
            raise InvariantViolatedError(f"{name}: {message}")

    def on_append(self, ledger_id: int, body: bytes) -> None:
        """The only writer appended `body`: it is the entry after the one before."""
        self._ledgers.setdefault(ledger_id, _History()).bodies.append(body)

    def on_metadata(self, path: str) -> None:
        """The node at `path` was just changed: what was acknowledged before must still be held."""
        for ledger_id, history in self._ledgers.items():
            if path == self._paths.ledger(ledger_id):
                metadata = self.stored(ledger_id)
                self._trace(f"ledger {ledger_id} is {metadata.state.name} {_ensembles(metadata)}")
                self._check_end(metadata)
                for entry_id in range(history.acked + 1):
                    self._check_quorum(metadata, entry_id)

    def on_ack(self, ledger_id: int, entry_id: int) -> None:
        """The writer was told that the entry is safe."""
        history = self._ledgers[ledger_id]
        self.acks += 1
        self._require(
            "NoOutOfOrderEntries",
            holds=entry_id == history.acked + 1 and entry_id < len(history.bodies),
            message=f"{ledger_id}:{entry_id} acknowledged after {history.acked}",
        )
        history.acked = entry_id
        metadata = self.stored(ledger_id)
        self._check_quorum(metadata, entry_id)
        self._check_end(metadata)

    def _check_quorum(self, metadata: LedgerMetadata, entry_id: int) -> None:
        ensemble = metadata.ensemble_of(entry_id).bookies
        quorum = metadata.quorum
        positions = {(entry_id + i) % len(ensemble) for i in range(quorum.write_quorum_size)}
        members = {ensemble[position] for position in positions}
        holders = [
            each.name
            for each in self._bookies
            if each.bookie in members and (metadata.ledger_id, entry_id) in each.acknowledged
        ]
        self._require(
            "AllCommittedEntriesReachAckQuorum",
            holds=len(holders) >= quorum.ack_quorum_size,
            message=(
                f"{metadata.ledger_id}:{entry_id} was acknowledged, and of its write set "
                f"{sorted(each.name for each in members)} only {holders} ever held it"
            ),
        )

    def _check_end(self, metadata: LedgerMetadata) -> None:
        if metadata.state is not LedgerState.CLOSED:
            return
        history = self._ledgers.setdefault(metadata.ledger_id, _History())
        end = (metadata.last_entry_id, metadata.length_bytes)
        history.end = history.end or end
        self._require(
            "NoDivergenceBetweenClientAndMetadata",
            holds=end == history.end,
            message=f"ledger {metadata.ledger_id} ended at {history.end} and then at {end}",
        )
        self._require(
            "NoDivergenceBetweenClientAndMetadata",
            holds=history.acked <= metadata.last_entry_id < len(history.bodies),
            message=(
                f"ledger {metadata.ledger_id} is closed at {metadata.last_entry_id}; appended were "
                f"{len(history.bodies)} entries and acknowledged those up to {history.acked}"
            ),
        )
        length = sum(map(len, history.bodies[: metadata.last_entry_id + 1]))
        self._require(
            "NoDivergenceBetweenClientAndMetadata",
            holds=metadata.length_bytes == length,
            message=f"ledger {metadata.ledger_id} has {metadata.length_bytes} bytes, not {length}",
        )

    def on_closed(self, metadata: LedgerMetadata) -> None:
        """Somebody was told that the ledger is closed like this."""
        self._trace(f"ledger {metadata.ledger_id} closed at {metadata.last_entry_id}")
        self._check_end(metadata)
        self._require(
            "NoDivergenceBetweenClientAndMetadata",
            holds=self.stored(metadata.ledger_id).last_entry_id == metadata.last_entry_id,
            message=f"ledger {metadata.ledger_id}: a client was told another end than is stored",
        )

    def on_published(self, ledger_id: int, last_add_confirmed: int) -> None:
        """The writer was told that readers see this LAC."""
        history = self._ledgers[ledger_id]
        history.published = max(history.published, last_add_confirmed)

    def lac_floor(self, ledger_id: int) -> int:
        """Return the LAC that a read starting now must see; explicit LACs die with a bookie."""
        history = self._ledgers.get(ledger_id)
        return -1 if history is None or self.has_lost_bookie else history.published

    def on_lac_read(self, ledger_id: int, last_add_confirmed: int, floor: int) -> None:
        """A reader was told a LAC; `floor` is from before it asked."""
        history = self._ledgers.setdefault(ledger_id, _History())
        self._require(
            "PublishedLacIsSeen",
            holds=floor <= last_add_confirmed or self.has_lost_bookie,
            message=f"ledger {ledger_id}: LAC {floor} was published, {last_add_confirmed} read",
        )
        end = len(history.bodies) if history.end is None else history.end[0] + 1
        self._require(
            "NoDirtyReads",
            holds=last_add_confirmed < end,
            message=f"ledger {ledger_id}: LAC {last_add_confirmed} of {end} entries",
        )

    def new_delivery(self, ledger_id: int) -> list[bytes]:
        """Return the record of one reader, to be filled by `on_delivered`."""
        delivered: list[bytes] = []
        self._ledgers.setdefault(ledger_id, _History()).delivered.append(delivered)
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
                "NoOutOfOrderEntries",
                holds=frame.entry_id == entry_id
                and entry_id < len(history.bodies)
                and history.bodies[entry_id] == body,
                message=f"{ledger_id}:{frame.entry_id} delivered as entry {entry_id}",
            )
            delivered.append(body)

    def check_all(self, ledger_ids: Sequence[int]) -> None:
        """Judge the whole run, once every ledger is closed and read again."""
        for ledger_id in ledger_ids:
            history = self._ledgers.setdefault(ledger_id, _History())
            metadata = self.stored(ledger_id)
            self._require(
                "LiveAfterHealing",
                holds=metadata.state is LedgerState.CLOSED,
                message=f"ledger {ledger_id} is {metadata.state.name}",
            )
            self._check_end(metadata)
            for delivered in history.delivered:
                self._require(
                    "NoDirtyReads",
                    holds=len(delivered) <= metadata.last_entry_id + 1,
                    message=f"ledger {ledger_id}: a reader got more than the closed ledger holds",
                )

    def on_read_whole(self, ledger_id: int, delivered: list[bytes]) -> None:
        """A reader read the closed ledger to its end, after everything healed."""
        history = self._ledgers[ledger_id]
        self._require(
            "AllAckedEntriesAreReadable",
            holds=len(delivered) > history.acked,
            message=(
                f"ledger {ledger_id}: acknowledged up to {history.acked}, readable are "
                f"{len(delivered)} entries"
            ),
        )


def _ensembles(metadata: LedgerMetadata) -> str:
    return " ".join(
        f"{ensemble.first_entry_id}:{','.join(each.name for each in ensemble.bookies)}"
        for ensemble in metadata.ensembles
    )
