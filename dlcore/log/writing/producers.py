"""The producers of one log, as its owner knows them.  No I/O, no clock, no randomness.

Theory of operation.  A producer has a name, which survives its restarts, and numbers its records of
a log: 0, 1, 2, ...  Each start of it is an incarnation with a `Claim`: an epoch that fences those
below, and the sequence from which on it writes.  The owner of the log knows of each producer

    accepted   the last sequence that was handed to the log's writer,
    logged     the last one that an entry was made of, which says so in its stamp,
    durable    the last one that is acknowledged,

and durable <= logged <= accepted.  A record is written if it follows `accepted`.  What comes again
is not: up to `durable` it is acknowledged at once, and above that when the record that is in flight
is; only what is durable is ever acknowledged.  What comes after a gap is an error that says which
sequence is expected.

The state is in the log.  Entries say whose records they hold; the first entry of an extent, and
further ones as it grows, have a snapshot of all producers, as has the last one of an owner that
closes the log under load.  A new owner reads the last segment that was stamped, from its newest
snapshot on, before it looks at any request (`restore`).

A claim that was granted and with which nothing was written is in no log.  Whoever owns the log next
believes it if nothing was written since it was granted: if it begins right behind the last record.
Otherwise an older incarnation has written more meanwhile, or another one, and it is fenced.  So a
grant needs no write of its own, and never lets two incarnations write the same sequences.

Forgotten are those that wrote nothing for `PRODUCERS_KEPT_MS`, and, where `PRODUCERS_MAX` are
known, one that was silent for `KEPT_MS`; else a new one is refused.  Of those whose names were made
for one writer both are less.  A claim of a forgotten one is fenced, unless it begins at 0.

Invariants: in the log, the sequences of a producer are 0, 1, 2, ... without a gap or a repetition;
what is durable is in the log.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dlcore.config import MIB
from dlcore.errors import (
    ConfigurationError,
    InvalidEntryError,
    OverCapacityError,
    ProducerFencedError,
    SequenceGapError,
)
from dlcore.ids import DLSN
from dlcore.log.entries.stamp import (
    GENERATED_PREFIX,
    PRODUCER_NAME_BYTES_MAX,
    PRODUCERS_KEPT_MS,
    Claim,
    ProducerRow,
    Stamp,
    StampedClaim,
    StampedRun,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_Ticket = TypeVar("_Ticket")

PRODUCERS_MAX = 10_000
KEPT_MS = 3600 * 1000
"""What was silent for less is not forgotten for others: its client may be about to send again."""
GENERATED_KEPT_MS = 600 * 1000
GENERATED_FORGOTTEN_MS = KEPT_MS
"""Both for those whose names were made for one writer."""
_SNAPSHOT_BYTES = 8 * MIB
_SNAPSHOT_ENTRIES = 1024
"""After so much of either the next entry has a snapshot, if that is a small part of it."""
_SNAPSHOT_SHARE = 16
_ROW_BYTES = 48
"""Of a row of a snapshot beside its name."""


@dataclass(slots=True)
class _Producer(Generic[_Ticket]):
    """A producer; its claim is that of the incarnation which may write."""

    number: int
    claim: Claim
    used_ms: int
    accepted: int
    logged: int
    durable: int
    logged_claim: Claim | None = None  # as the log has it since the last snapshot
    logged_dlsn: DLSN | None = None
    durable_dlsn: DLSN | None = None
    in_flight: deque[tuple[int, _Ticket]] | None = None
    # Of each batch that is not durable, in order, its last sequence.  Most producers have none: an
    # empty deque is as large as all the rest.


@dataclass(frozen=True, slots=True)
class Fresh:
    """These records are to be written, but for the first `known` of them."""

    known: int


@dataclass(frozen=True, slots=True)
class InFlight(Generic[_Ticket]):
    """They are accepted, and durable once the ticket's records are, which have the last of them.

    So what comes again in order is answered in order.  `is_last` says whether the last of them is
    the last of the ticket's.
    """

    ticket: _Ticket
    is_last: bool


@dataclass(frozen=True, slots=True)
class Durable:
    """They are durable; where the last of them is may be forgotten."""

    dlsn: DLSN | None


@dataclass(frozen=True, slots=True)
class Mark:
    """Records of an incarnation, the first of which has this sequence."""

    claim: Claim
    first: int


@dataclass(frozen=True, slots=True)
class MarkedRows:
    """Of these `count` rows of an entry the last one is at `last_slot`, the first has the mark."""

    mark: Mark
    count: int
    last_slot: int


class Producers(Generic[_Ticket]):
    """The producers of a log; a `_Ticket` is what is held of a batch that was accepted."""

    def __init__(self, *, producers_max: int = PRODUCERS_MAX) -> None:
        self._producers_max = producers_max
        self._known: dict[str, _Producer[_Ticket]] = {}
        self._numbers: dict[int, str] = {}
        self._next_number = 0
        # Of the extent that is written: where the newest snapshot is, and what came after it.
        self._segment = -1
        self._snapshot = 0
        self._bytes_since = 0
        self._is_stamping = False
        self.has_stamped = False
        """Whether the extent that is written has a stamped entry, and so its last one is."""

    def __repr__(self) -> str:
        return f"<Producers {len(self._known)}>"

    def __len__(self) -> int:
        return len(self._known)

    # Incarnations

    def grant(self, name: str, token: bytes, *, now_ms: int) -> Claim:
        """Begin an incarnation of a producer: those before it may write nothing more.

        It writes behind all that was accepted, which is to be durable before it is told.

        Raises:
            ConfigurationError: it is no name.
            OverCapacityError: there is no place for one more.
        """
        known = self._known.get(name)
        if known is None:
            return self._add(Claim(name=name, epoch=1, base=0, token=token), now_ms)
        epoch, base = known.claim.epoch + 1, known.accepted + 1
        known.claim = Claim(name=name, epoch=epoch, base=base, token=token)
        return known.claim

    def continue_with(self, claim: Claim, *, now_ms: int) -> int:
        """Let an incarnation go on; return the last sequence of its producer that is durable.

        Raises:
            ProducerFencedError: a later one writes, or this one is forgotten.
            ConfigurationError, OverCapacityError: as `grant`.
        """
        known = self._known.get(claim.name)
        if known is None:
            if claim.base:
                raise ProducerFencedError(
                    f"producer {claim.name!r} is not known to the log any more, which forgets "
                    "those that wrote nothing for long: begin a new incarnation"
                )
            self._add(claim, now_ms)
            return -1
        if claim.epoch > known.claim.epoch and claim.base == known.accepted + 1:
            known.claim = claim  # granted by an owner before this one
        self._require(known, claim)
        return known.durable

    def _add(self, claim: Claim, now_ms: int) -> Claim:
        name = claim.name
        if not (name.isprintable() and 1 <= len(name.encode()) <= PRODUCER_NAME_BYTES_MAX):
            raise ConfigurationError(
                f"producer {name!r}: expected a name of 1 to {PRODUCER_NAME_BYTES_MAX} bytes that "
                "can be printed"
            )
        if len(self._known) >= self._producers_max:
            self._make_room(now_ms)
        self._put(_Producer(self._next_number, claim, now_ms, -1, -1, -1))
        return claim

    def _put(self, producer: _Producer[_Ticket]) -> None:
        self._known[producer.claim.name] = producer
        self._numbers[producer.number] = producer.claim.name
        self._next_number = max(self._next_number, producer.number + 1)

    def _make_room(self, now_ms: int) -> None:
        settled = (each for each in self._known.values() if each.durable == each.accepted)
        silent = min(settled, key=_needed_until_ms, default=None)
        if silent is None or now_ms < _needed_until_ms(silent):
            raise OverCapacityError(
                f"the log knows {len(self._known)} producers, the limit, and none of them has been "
                f"silent for {KEPT_MS // 60_000} minutes"
            )
        self._forget(silent)

    def _forget(self, producer: _Producer[_Ticket]) -> None:
        del self._known[producer.claim.name]
        del self._numbers[producer.number]

    def _require(self, known: _Producer[_Ticket], claim: Claim) -> None:
        if known.claim != claim:
            raise ProducerFencedError(
                f"producer {claim.name!r}: incarnation {claim.epoch} was superseded by "
                f"{known.claim.epoch}, which goes on behind sequence {known.claim.base - 1}"
            )

    # Records

    def durable_of(self, name: str) -> int:
        """Return the last durable sequence of a producer; -1 if there is none."""
        known = self._known.get(name)
        return -1 if known is None else known.durable

    def look_at(self, claim: Claim, first: int, count: int) -> Fresh | InFlight[_Ticket] | Durable:
        """Tell what is to become of some records, at least one, of which this is the first.

        Raises:
            ProducerFencedError: another incarnation writes.
            SequenceGapError: they do not follow.
        """
        known = self._known.get(claim.name)
        if known is None:
            raise ProducerFencedError(f"producer {claim.name!r} was forgotten: begin anew")
        self._require(known, claim)
        if not claim.base <= first <= known.accepted + 1:
            raise SequenceGapError(
                f"producer {claim.name!r}: sequence {first} does not follow, expected "
                f"{known.accepted + 1}",
                expected=known.accepted + 1,
            )
        last = first + count - 1
        if last > known.accepted:
            return Fresh(known.accepted + 1 - first)
        if last > known.durable:
            assert known.in_flight is not None
            at = bisect_left(known.in_flight, last, key=itemgetter(0))
            end, ticket = known.in_flight[at]
            return InFlight(ticket, last == end)
        return Durable(known.durable_dlsn if last == known.durable else None)

    def accepted(self, mark: Mark, count: int, ticket: _Ticket, *, now_ms: int) -> None:
        """Note that fresh records were handed to the writer."""
        known = self._known[mark.claim.name]
        assert mark.first == known.accepted + 1
        known.accepted += count
        if known.in_flight is None:
            known.in_flight = deque()
        known.in_flight.append((known.accepted, ticket))
        known.used_ms = max(known.used_ms, now_ms)

    def durable(self, mark: Mark, count: int, dlsn: DLSN) -> None:
        """Note that records accepted together are durable, the last of them at `dlsn`."""
        known = self._known[mark.claim.name]
        assert known.in_flight is not None
        end, _ = known.in_flight.popleft()
        assert (mark.first, end) == (known.durable + 1, known.durable + count)
        known.durable = end
        known.durable_dlsn = dlsn
        if not known.in_flight:
            known.in_flight = None

    # The log

    def stamp(
        self,
        rows: Sequence[MarkedRows],
        *,
        lssn: int,
        entry_id: int,
        size_bytes: int,
        now_ms: int,
        is_first: bool = False,
        is_last: bool = False,
    ) -> bytes:
        """Return the stamp of the next entry of the log, which holds these rows; b"" for none.

        `is_first`: of an extent, others' may come before it in the segment.  `is_last`: of this
        owner, the next one of the log is about to read it.
        """
        if is_first or lssn != self._segment:
            self._segment = lssn
            self.has_stamped = False
        if not (self.has_stamped or self._known):
            return b""
        is_due = self._is_due(entry_id, is_last=is_last)
        snapshot = self._snapshot_of(entry_id, now_ms) if is_due else None
        claims, runs = self._add_rows(rows, lssn, entry_id)
        stamp = Stamp(self._snapshot, snapshot, tuple(claims), tuple(runs)).encode()
        self._bytes_since += size_bytes + len(stamp)
        return stamp

    def _is_due(self, entry_id: int, *, is_last: bool) -> bool:
        if not self.has_stamped:
            return True
        snapshot_bytes = (_ROW_BYTES + PRODUCER_NAME_BYTES_MAX) * len(self._known)
        if is_last:
            return self._bytes_since >= snapshot_bytes  # which the next owner would read
        is_much = (
            self._bytes_since >= _SNAPSHOT_BYTES or entry_id - self._snapshot >= _SNAPSHOT_ENTRIES
        )
        return is_much and self._bytes_since >= _SNAPSHOT_SHARE * snapshot_bytes

    def _snapshot_of(self, entry_id: int, now_ms: int) -> tuple[ProducerRow, ...]:
        self._forget_old(now_ms)
        self._snapshot, self._bytes_since, self.has_stamped = entry_id, 0, True
        rows = []
        for each in self._known.values():
            each.logged_claim = each.claim if each.logged >= 0 else None
            if each.logged_dlsn is not None:
                claim, dlsn = each.claim, each.logged_dlsn
                rows.append(
                    ProducerRow(
                        number=each.number,
                        name=claim.name,
                        epoch=claim.epoch,
                        base=claim.base,
                        token=claim.token,
                        last=each.logged,
                        dlsn=(dlsn.lssn, dlsn.entry_id, dlsn.slot_id),
                        used_ms=each.used_ms,
                    )
                )
        return tuple(rows)

    def _forget_old(self, now_ms: int) -> None:
        for each in list(self._known.values()):
            is_settled = each.durable == each.accepted
            is_generated = each.claim.name.startswith(GENERATED_PREFIX)
            kept_ms = GENERATED_FORGOTTEN_MS if is_generated else PRODUCERS_KEPT_MS
            if is_settled and now_ms - each.used_ms >= kept_ms:
                self._forget(each)

    def _add_rows(
        self, rows: Iterable[MarkedRows], lssn: int, entry_id: int
    ) -> tuple[list[StampedClaim], list[StampedRun]]:
        claims: list[StampedClaim] = []
        runs: list[StampedRun] = []
        for part in rows:
            claim = part.mark.claim
            known = self._known[claim.name]
            assert part.mark.first == known.logged + 1
            if known.logged_claim != claim:
                known.logged_claim = claim
                claims.append(
                    StampedClaim(known.number, claim.name, claim.epoch, claim.base, claim.token)
                )
            runs.append(StampedRun(known.number, part.mark.first, part.count, part.last_slot))
            known.logged += part.count
            known.logged_dlsn = DLSN(lssn, entry_id, part.last_slot)
            assert known.logged <= known.accepted
        return claims, runs

    def restore(self, stamp: Stamp, *, lssn: int, entry_id: int, written_ms: int) -> None:
        """Take over what an entry of the log says; the first one has a snapshot.

        Raises:
            InvalidEntryError: it does not follow what is known.
        """
        for row in stamp.rows or ():
            claim = Claim(name=row.name, epoch=row.epoch, base=row.base, token=row.token)
            found: _Producer[_Ticket] = _Producer(
                row.number, claim, row.used_ms, row.last, row.last, row.last
            )
            found.logged_dlsn = found.durable_dlsn = DLSN(*row.dlsn)
            self._put(found)
        for each in stamp.claims:
            claim = Claim(name=each.name, epoch=each.epoch, base=each.base, token=each.token)
            known = self._known.get(each.name)
            if known is None or known.number != each.number:
                if known is not None:
                    self._forget(known)  # as the owner had, before it came again
                self._put(_Producer(each.number, claim, written_ms, -1, -1, -1))
            else:
                known.claim = claim
        for run in stamp.runs:
            name = self._numbers.get(run.number)
            known = None if name is None else self._known[name]
            if known is None or run.first != known.logged + 1:
                raise InvalidEntryError(
                    f"entry {entry_id} of segment {lssn} has records of producer {name!r} "
                    f"(number {run.number}) from sequence {run.first} on, expected "
                    f"{None if known is None else known.logged + 1}"
                )
            known.accepted = known.logged = known.durable = run.first + run.count - 1
            known.logged_dlsn = known.durable_dlsn = DLSN(lssn, entry_id, run.last_slot)
            known.used_ms = max(known.used_ms, written_ms)


def _needed_until_ms(producer: _Producer[Any]) -> int:
    """Return until when a producer may send again, and is forgotten for nobody."""
    if producer.accepted < 0:
        return 0
    is_generated = producer.claim.name.startswith(GENERATED_PREFIX)
    return producer.used_ms + (GENERATED_KEPT_MS if is_generated else KEPT_MS)
