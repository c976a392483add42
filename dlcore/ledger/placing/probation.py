"""Retries of a failed bookie that nobody can replace: later after each failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlcore.ids import BookieId

PAUSE_S = 1.0
PAUSE_S_MAX = 120.0


@dataclass(slots=True)
class _Record:
    failed_at: float
    pause_s: float


class Probation:
    """The failures of bookies since they last behaved for longer than their pause and `conduct_s`.

    It is one ledger's, about members of its ensemble; what all ledgers know is in `quarantine`.
    Times are of any clock that does not go back, in seconds.
    """

    def __init__(self, *, conduct_s: float) -> None:
        self._conduct_s = conduct_s
        self._records: dict[BookieId, _Record] = {}
        self._out: frozenset[BookieId] = frozenset()

    def note_failed(self, failed: Collection[BookieId], now: float) -> None:
        """Note all bookies that are failed now; those that were not before failed once more."""
        for bookie in failed:
            if bookie in self._out:
                continue
            known = self._records.get(bookie)
            pause_s = PAUSE_S
            if known is not None and now <= known.failed_at + 2 * known.pause_s + self._conduct_s:
                pause_s = min(known.pause_s * 2, PAUSE_S_MAX)
            self._records[bookie] = _Record(now, pause_s)
        self._out = frozenset(failed)

    def note_admitted(self, failed: Collection[BookieId]) -> None:
        """Note that only `failed` are left out now."""
        self._out = self._out.intersection(failed)

    def is_over(self, bookie: BookieId, now: float) -> bool:
        """Whether the bookie may get entries again."""
        record = self._records.get(bookie)
        return record is None or now >= record.failed_at + record.pause_s

    def is_last_hope(self, bookie: BookieId, now: float) -> bool:
        """Whether to try it even so where nobody else is left; not at once after it failed."""
        record = self._records.get(bookie)
        return record is None or now >= record.failed_at + PAUSE_S
