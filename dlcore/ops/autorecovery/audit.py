"""The audit: bookies that are lost, and ledgers that lack replicas because of them.

Theory of operation.  A bookie is *absent* when its incarnation is not registered, and *lost* when

* another incarnation is registered under its name: its data will not come back; or
* it has been absent for the delay; or
* it vanished together with another one, both while this auditor watched and neither for longer than
  the delay: one more failure could lose data.

While no bookie at all is registered, none counts as lost: the metadata store was restored, or the
network or the whole cluster is down.  A bookie that is still absent after that gets the whole delay
again.  The same holds when an auditor begins, because the cluster may be starting.  A bookie that
is registered again is not lost any more.

A closed ledger that was created with fewer bookies than wanted also lacks replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.base.config import DEFAULT_QUORUM
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlcore.base.ids import BookieId


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """The result of a look at the bookies, which are in order.

    `look_again_s` is the time until the next absent bookie becomes lost, if nothing else happens
    before.
    """

    lost: tuple[BookieId, ...]
    look_again_s: float | None


class BookieAudit:
    """One auditor's view of the bookies.  Times come from any clock that does not go back."""

    def __init__(self, *, lost_bookie_delay_s: float) -> None:
        self._delay_s = lost_bookie_delay_s
        self._seen: set[BookieId] = set()  # registered at any look since none was registered
        self._absent_since: dict[BookieId, float] = {}
        self._lost: set[BookieId] = set()

    def look(
        self, *, known: Collection[BookieId], registered: Collection[BookieId], now: float
    ) -> AuditResult:
        """Compare the bookies that have or had data with those that are registered now."""
        if not registered:
            self._seen.clear()
            self._absent_since.clear()
            self._lost.clear()
            return AuditResult(lost=(), look_again_s=None)
        self._seen.update(registered)
        absent = sorted(set(known).difference(registered))
        self._absent_since = {each: self._absent_since.get(each, now) for each in absent}
        self._lost.intersection_update(absent)
        names = {each.name for each in registered}
        due_s = {each: self._absent_since[each] + self._delay_s - now for each in absent}
        fresh = [
            each
            for each in absent
            if each in self._seen and each.name not in names and due_s[each] > 0
        ]
        if len(fresh) > 1:
            self._lost.update(fresh)
        self._lost.update(each for each in absent if each.name in names or due_s[each] <= 0)
        waits = [due_s[each] for each in absent if each not in self._lost]
        return AuditResult(
            lost=tuple(sorted(self._lost)),
            look_again_s=min(waits, default=None),
        )


class Shortage:
    """Detects that a shortage of writable bookies has eased.

    Ledgers that were created smaller during the shortage are found by the next look at all ledgers.
    This look is expensive; it pays at once when bookies are back, and only then.
    """

    def __init__(self) -> None:
        self.wanted = DEFAULT_QUORUM.write_quorum_size
        """Most bookies that any ledger wants to store an entry."""
        self._writable: int | None = None  # at the last call

    def has_eased(self, writable: int) -> bool:
        """Note how many bookies are writable; return whether a shortage eased since then."""
        before, self._writable = self._writable, writable
        return before is not None and before < min(writable, self.wanted)


def wanted_copies(metadata: LedgerMetadata) -> int:
    """Return how many bookies should store each entry of a ledger."""
    return metadata.quorum.write_quorum_size + metadata.copies_lacking


def lacks_copies(metadata: LedgerMetadata) -> bool:
    """Whether a closed ledger has fewer bookies than wanted, so that more can join it."""
    return metadata.state is LedgerState.CLOSED and metadata.copies_lacking > 0


def is_sound(metadata: LedgerMetadata) -> bool:
    """Whether a ledger has an end or a writer, and all wanted copies, as far as is stored of it.

    One that is IN_RECOVERY has neither an end nor a writer.
    """
    return metadata.state is not LedgerState.IN_RECOVERY and not lacks_copies(metadata)


def lost_members(metadata: LedgerMetadata, lost: Collection[BookieId]) -> tuple[BookieId, ...]:
    """Return the lost bookies in the ledger's ensembles, which make it under-replicated."""
    members = {bookie for ensemble in metadata.ensembles for bookie in ensemble.bookies}
    return tuple(sorted(members.intersection(lost)))
