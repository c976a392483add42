"""The proof that ledgers are deleted: they look deleted twice, with enough time between.

Absence alone proves nothing: a metadata store that lost its data, or a bug in listing it, would
make every ledger look deleted.  If too many look deleted at once, a brake holds them back for a
day.  In this time an operator can find the cause, and can restore the missing metadata.  A ledger
that looks deleted in every pass of that day counts as deleted.  After an operator has released the
brake, the normal time is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from bookie.config import GarbageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageVerdict:
    """The result of one pass."""

    deleted: frozenset[int]
    held: str
    """Description of the ledgers that the brake holds back, and for how long; empty if none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageReport:
    """The result of one garbage collection."""

    ledgers_deleted: int
    files_deleted: int
    bytes_freed: int
    held: str
    """Description of the ledgers that the brake holds back, and for how long; empty if none."""
    waiting: frozenset[int] = frozenset()
    """Ledgers that look deleted, without a proof yet."""


class _Suspicion(NamedTuple):
    """Since when a ledger looks deleted, and whether the brake was on at any time since."""

    since_ms: int
    is_braked: bool


class GarbageJudge:
    """Knows since when each ledger looks deleted; pure, the time is a parameter."""

    def __init__(self, config: GarbageConfig) -> None:
        self.config = config
        self._suspicions: dict[int, _Suspicion] = {}

    @property
    def waiting(self) -> frozenset[int]:
        """Ledgers that look deleted, without a proof yet."""
        return frozenset(self._suspicions)

    def judge(
        self,
        *,
        seen: Collection[int],
        looks_deleted: Collection[int],
        now_ms: int,
        is_released: bool = False,
        at_once: Collection[int] = (),
    ) -> GarbageVerdict:
        """Evaluate one pass over the ledgers `seen`, and return those that are now proven deleted.

        With `is_released` the brake holds nothing back, because an operator has confirmed the
        deletions.  Ledgers of `at_once` are deleted if they look deleted now, because the client
        that deleted them says so.
        """
        config = self.config
        certain = frozenset(at_once).intersection(looks_deleted)
        looks_deleted = [each for each in looks_deleted if each not in certain]
        count, total = len(looks_deleted), len(seen)
        # Both: a small bookie may lose all its ledgers at once, and a large one many in good order.
        is_braked = count > config.brake_count and count > config.brake_share * total
        before = self._suspicions
        # A clock that went backwards starts the age again, so that nothing is confirmed too early.
        now = _Suspicion(now_ms, is_braked)
        self._suspicions = {
            ledger_id: _Suspicion(min(known.since_ms, now_ms), known.is_braked or is_braked)
            for ledger_id in looks_deleted
            for known in (before.get(ledger_id, now),)
        }
        age_ms = {False: config.age_ms, True: config.brake_age_ms}
        deleted = frozenset(
            ledger_id
            for ledger_id, each in self._suspicions.items()
            # Two passes at least: one answer of the metadata store proves nothing.
            if ledger_id in before
            and now_ms - each.since_ms >= age_ms[each.is_braked and not is_released]
        )
        for ledger_id in deleted:
            del self._suspicions[ledger_id]
        return GarbageVerdict(deleted=deleted | certain, held=self._held(now_ms, total))

    def _held(self, now_ms: int, total: int) -> str:
        braked = [each.since_ms for each in self._suspicions.values() if each.is_braked]
        if not braked:
            return ""
        left_s = (min(braked) + self.config.brake_age_ms - now_ms) / 1000
        return (
            f"{len(braked)} of {total} ledgers looked deleted at once, more than the brake allows "
            f"({self.config.brake_count} and a share of {self.config.brake_share}): they are "
            f"kept for {max(0.0, left_s):.0f} s more; if they really are deleted, "
            "dlog bookie collect NAME lets them go now"
        )
