"""The health of bookies as one client sees it, for the choice of bookies and of replicas.

Theory of operation.  Every answer of a bookie and every missing answer is noted here, adds and
reads apart: a bookie with a damaged file still stores new entries, and one that is read-only still
answers reads.  All ledgers of a client share these notes.

- A bookie that failed and has had no success since *rests*: it is not chosen while others suffice.
- A bookie that fails too often is *quarantined*: it is not chosen either, for a period of random
  length, so that clients that saw the same failure do not all come back at once.  A single success
  ends the quarantine.
- A bookie that failed and that no other could replace in an ensemble is *tried* again after a
  pause, because each trial costs the ledger a time-out.  The pauses double until the bookie behaves
  for longer than its last pause.

A new registration ends all of this: another process has the name now.  `ReplacementSearch` belongs
to one ledger.  It decides which bookies may replace failed members, and when to look again.
Times are in seconds, of any clock that does not go back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.backoff import Backoff

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Sequence

    from dlcore.base.config import QuarantineConfig
    from dlcore.base.ids import BookieId

REST_S = 10.0
"""A dead bookie's registration lasts about this long.  If the bookie were chosen during that time,
the next ensemble change would follow at once."""
TRIAL_S = 1.0
TRIAL_S_MAX = 120.0
_PERIOD_SPREAD = 0.5
_LOOK_S = 1.0
"""First pause before a look at a failed member that no bookie could replace; it doubles."""
_LOOK_S_MAX = 5.0
_STUCK_S = 0.1
_STUCK_S_MAX = 2.0


@dataclass(slots=True)
class _Record:
    """The answers of one bookie in this window and the one before, and its trials."""

    window_since: float
    failures: int = 0
    successes: int = 0
    failures_before: int = 0
    successes_before: int = 0
    row: int = 0  # failures since the last success
    failed_at: float = -math.inf
    quarantined_until: float | None = None
    trial: Backoff = field(default_factory=lambda: Backoff(TRIAL_S, TRIAL_S_MAX))


class Conduct:
    """How the bookies that one client talks to answer one kind of request.

    Args:
        config: when a bookie is quarantined, and for how long.
        conduct_s: a bookie that behaves for this much longer than its last pause begins with short
            pauses again.
        rng: draws the lengths of quarantines.
    """

    def __init__(self, config: QuarantineConfig, *, conduct_s: float, rng: random.Random) -> None:
        self._config = config
        self._conduct_s = conduct_s
        self._rng = rng
        self._records: dict[BookieId, _Record] = {}

    def note_success(self, bookie: BookieId, now: float) -> None:
        """Note that the bookie did what it was asked for: it can be chosen again from now on."""
        record = self._record_of(bookie, now)
        record.successes += 1
        record.row = 0
        record.quarantined_until = None

    def note_failure(self, bookie: BookieId, now: float) -> bool:
        """Note a refusal or a missing answer; return whether a quarantine begins with it."""
        self.note_refusal(bookie, now)
        record = self._record_of(bookie, now)
        record.failures += 1
        record.row += 1
        if self.is_quarantined(bookie, now) or not self._is_too_bad(record):
            return False
        spread = self._rng.uniform(1 - _PERIOD_SPREAD, 1 + _PERIOD_SPREAD)
        record.quarantined_until = now + self._config.period_s * spread
        return True

    def note_refusal(self, bookie: BookieId, now: float) -> None:
        """Note that it refused an entry, its fault or not: a second try would fail too."""
        record = self._record_of(bookie, now)
        record.failed_at = now
        trial = record.trial
        if now > trial.due_s + trial.pause_s + self._conduct_s:
            trial.succeeded()
        trial.failed(now)

    def release(self, bookie: BookieId) -> None:
        """Forget all about the bookie: another process has its name now."""
        self._records.pop(bookie, None)

    def is_quarantined(self, bookie: BookieId, now: float) -> bool:
        """Whether the bookie keeps failing, as far as is known."""
        record = self._records.get(bookie)
        if record is None or record.quarantined_until is None:
            return False
        return now < record.quarantined_until

    def is_resting(self, bookie: BookieId, now: float) -> bool:
        """Whether the bookie failed a moment ago and has had no success since."""
        record = self._records.get(bookie)
        return record is not None and record.row > 0 and now < record.failed_at + REST_S

    def may_return(self, bookie: BookieId, now: float) -> bool:
        """Whether a member that failed, and that no bookie replaced, may be tried again."""
        record = self._records.get(bookie)
        return record is None or now >= record.trial.due_s

    def is_last_hope(self, bookie: BookieId, now: float) -> bool:
        """Whether to try it although it failed, if no other is left; not right after a failure."""
        record = self._records.get(bookie)
        return record is None or now >= record.failed_at + TRIAL_S

    def _is_too_bad(self, record: _Record) -> bool:
        failures = record.failures + record.failures_before
        if failures < self._config.failures_min:
            return False
        answers = failures + record.successes + record.successes_before
        # A bookie that stops suddenly still has a minute of successes on record.
        return (
            record.row >= self._config.failures_min
            or failures >= self._config.failure_share * answers
        )

    def _record_of(self, bookie: BookieId, now: float) -> _Record:
        record = self._records.get(bookie)
        if record is None:
            record = self._records[bookie] = _Record(now)
        windows = (now - record.window_since) // self._config.window_s
        if windows >= 1:
            # Two windows count, so that a bookie does not become good at the boundary between them.
            is_next = windows < 2
            record.failures_before = record.failures if is_next else 0
            record.successes_before = record.successes if is_next else 0
            record.failures = record.successes = 0
            record.window_since = now
        return record


@dataclass(frozen=True, slots=True)
class BookieHealth:
    """One client's notes about the answers of its bookies."""

    adds: Conduct
    reads: Conduct

    def is_suspect(self, bookie: BookieId, now: float) -> bool:
        """Whether a read should ask another replica first."""
        return any(
            each.is_resting(bookie, now) or each.is_quarantined(bookie, now)
            for each in (self.adds, self.reads)
        )

    def release(self, bookie: BookieId) -> None:
        """Forget all about the bookie: another process has its name now."""
        self.adds.release(bookie)
        self.reads.release(bookie)


class Choice(NamedTuple):
    """Bookies that a ledger may use to replace members that failed."""

    candidates: Sequence[BookieId]
    readmitted: Sequence[BookieId]
    """Members that get entries again if no bookie can replace them."""
    pause_s: float = 0.0
    """How long to wait before they are tried: they failed a moment ago."""
    may_wait: bool = False
    """Whether adds that still cannot reach Qa may wait for other bookies, or must fail now."""


class ReplacementSearch:
    """One ledger's search for bookies that replace members that failed.

    A bookie that failed lately is left out, unless adds wait and no other bookie is there.  A
    bookie that is registered and does not answer would delay everything that is sent to it, again
    and again.  It is tried at longer and longer intervals, unless entries cannot do without it.

    Args:
        conduct: how the bookies answer adds.
        patience_s: how long an entry that cannot reach Qa waits for bookies.
    """

    def __init__(self, conduct: Conduct, *, patience_s: float) -> None:
        self._conduct = conduct
        self._patience_s = patience_s
        self._look = Backoff(_LOOK_S, _LOOK_S_MAX)
        self._is_later_look = False
        self._stuck = Backoff(_STUCK_S, _STUCK_S_MAX)
        self._is_stuck = False
        self._stuck_entry = -1
        self._stuck_since = -math.inf

    def choose(
        self,
        registered: Sequence[BookieId],
        *,
        members: Collection[BookieId],
        stuck_entry: int | None,
        now: float,
    ) -> Choice:
        """Choose from the writable bookies.

        Args:
            registered: the writable bookies.
            members: the last ensemble.
            stuck_entry: the first unconfirmed entry, if some entry cannot reach Qa.  The time
                that it may wait begins anew with each other one: some were confirmed meanwhile.
            now: the time.
        """
        conduct = self._conduct
        usable = [each for each in registered if not conduct.is_resting(each, now)]
        is_later_look, self._is_later_look = self._is_later_look, False
        self._is_stuck = stuck_entry is not None
        if stuck_entry is None:
            back = conduct.may_return if is_later_look else None
            return Choice(usable, [each for each in registered if back and back(each, now)])
        readmitted = [each for each in registered if conduct.is_last_hope(each, now)]
        # While a member is tried once more, it may still answer, and nothing counts as stuck.
        # That is no progress: if the time began anew after each trial, it would never end.
        if stuck_entry != self._stuck_entry:
            self._stuck_entry, self._stuck_since = stuck_entry, now
            self._stuck.succeeded()
        pause_s = max(self._stuck.pause_s, _STUCK_S)
        may_wait = now + pause_s <= self._stuck_since + self._patience_s
        # Another bookie that behaves is there, or the time is over: leave out those that rest.
        if not may_wait or not set(usable).issubset(members):
            return Choice(usable, readmitted, may_wait=may_wait)
        # Only bookies that failed a moment ago are left, and one of them is better than none. If
        # all are members, none can join, and `look_later` gives the pause.
        is_all_members = set(registered).issubset(members)
        return Choice(
            registered,
            readmitted,
            pause_s=0.0 if is_all_members else self._stuck.failed(now),
            may_wait=True,
        )

    def look_later(self, now: float) -> float:
        """Return how long to go on without the failed members before looking again."""
        return (self._stuck if self._is_stuck else self._look).failed(now)

    def look_again(self) -> None:
        """Allow the next choice to readmit members that failed."""
        self._is_later_look = True

    def replaced(self) -> None:
        """Note that an ensemble change is stored."""
        self._look.succeeded()
