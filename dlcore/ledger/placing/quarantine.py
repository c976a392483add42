"""Quarantine of bookies that failed lately or keep on failing: a client does not choose them.

All ledgers of a client share what it learns here.  A bookie that answers too many requests with
failures is quarantined: it is not chosen while others suffice.  The period has a random length, so
that clients that saw the same failure do not come back to the bookie all at once, and leave it all
at once again.  A single success ends the quarantine, as does a new registration: the bookie works,
or is another process.

`Probation` answers another question, for one ledger: when a failed *member* of its ensemble, which
nobody replaced, gets entries again.  Its pauses double, for each trial costs the ledger a time-out.
Quarantine is about bookies that are not in the ensemble, and about all ledgers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from dlcore.config import QuarantineConfig
    from dlcore.ids import BookieId

REST_S = 10.0
"""A bookie that failed and did nothing well since rests for this long: its registration outlives
it by about as much, and choosing it at once would only make the next ensemble change."""
_PERIOD_SPREAD = 0.5


@dataclass(slots=True)
class _Conduct:
    """The answers of one bookie in this window and the one before."""

    window_since: float
    failures: int = 0
    successes: int = 0
    failures_before: int = 0
    successes_before: int = 0
    row: int = 0  # failures since the last success
    failed_at: float = 0.0
    quarantined_until: float | None = None


class Quarantine:
    """The conduct of the bookies that one client talks to.

    Times are of any clock that does not go back, in seconds.
    """

    def __init__(self, config: QuarantineConfig, *, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._conducts: dict[BookieId, _Conduct] = {}

    def note_success(self, bookie: BookieId, now: float) -> None:
        """Note that the bookie did as it was asked: it is chosen again from now on."""
        conduct = self._conduct_of(bookie, now)
        conduct.successes += 1
        conduct.row = 0
        conduct.quarantined_until = None

    def note_failure(self, bookie: BookieId, now: float) -> bool:
        """Note a refusal or a missing answer; return whether a quarantine begins with it."""
        conduct = self._conduct_of(bookie, now)
        conduct.failures += 1
        conduct.row += 1
        conduct.failed_at = now
        if self.is_quarantined(bookie, now) or not self._is_too_bad(conduct):
            return False
        spread = self._rng.uniform(1 - _PERIOD_SPREAD, 1 + _PERIOD_SPREAD)
        conduct.quarantined_until = now + self._config.period_s * spread
        return True

    def release(self, bookie: BookieId) -> None:
        """Forget all about the bookie: another process stands behind its name now."""
        self._conducts.pop(bookie, None)

    def is_quarantined(self, bookie: BookieId, now: float) -> bool:
        """Whether the bookie keeps on failing, as far as is known."""
        conduct = self._conducts.get(bookie)
        if conduct is None or conduct.quarantined_until is None:
            return False
        return now < conduct.quarantined_until

    def is_resting(self, bookie: BookieId, now: float) -> bool:
        """Whether the bookie failed a moment ago, and has done nothing well since."""
        conduct = self._conducts.get(bookie)
        return conduct is not None and conduct.row > 0 and now < conduct.failed_at + REST_S

    def _is_too_bad(self, conduct: _Conduct) -> bool:
        failures = conduct.failures + conduct.failures_before
        if failures < self._config.failures_min:
            return False
        answers = failures + conduct.successes + conduct.successes_before
        # A bookie that stops all at once has its good minute still on record.
        return (
            conduct.row >= self._config.failures_min
            or failures >= self._config.failure_share * answers
        )

    def _conduct_of(self, bookie: BookieId, now: float) -> _Conduct:
        conduct = self._conducts.get(bookie)
        if conduct is None:
            conduct = self._conducts[bookie] = _Conduct(now)
        windows = (now - conduct.window_since) // self._config.window_s
        if windows >= 1:
            is_next = windows < 2
            conduct.failures_before = conduct.failures if is_next else 0
            conduct.successes_before = conduct.successes if is_next else 0
            conduct.failures = conduct.successes = 0
            conduct.window_since = now
        return conduct


@dataclass(frozen=True, slots=True)
class BookieConduct:
    """What one client has seen of its bookies.

    Adds and reads are judged apart: a bookie with a damaged file still stores new entries, and one
    that is read-only still answers reads.
    """

    adds: Quarantine
    reads: Quarantine

    def is_suspect(self, bookie: BookieId, now: float) -> bool:
        """Whether a read had better ask another replica first."""
        return any(
            each.is_resting(bookie, now) or each.is_quarantined(bookie, now)
            for each in (self.adds, self.reads)
        )

    def release(self, bookie: BookieId) -> None:
        """Forget all about the bookie: another process stands behind its name now."""
        self.adds.release(bookie)
        self.reads.release(bookie)
