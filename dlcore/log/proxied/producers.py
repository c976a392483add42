"""The producers of one log, as its owner knows them.  No I/O, no clock, no randomness.

Theory of operation.  A producer has a name, which survives its restarts, and numbers its records of
a log: 0, 1, 2, ...  Each start of it is an incarnation with a `Claim`: an epoch that fences the
lower ones, and the first sequence that it writes.  The owner of the log knows of each producer

    accepted   the last sequence that was passed to the log's writer,
    logged     the last one that is in an entry, whose stamp says so,
    durable    the last one that is acknowledged,

and durable <= logged <= accepted.  A record is written if it follows `accepted`.  A repeated record
is not written again.  Up to `durable` it is acknowledged at once.  Above that it is acknowledged
when the record in flight is; only durable records are ever acknowledged.  A record after a gap gets
an error with the expected sequence.

The state is in the log.  Entries have stamps of their producers.  The first entry of an extent, and
further ones as it grows, have a snapshot of all producers, and so has the last entry of an owner
that closes the log under load.  Before a new owner serves any request it reads the last stamped
segment, from its newest snapshot on (`restore`).

A claim that was granted and not yet written with is in no log.  The next owner of the log believes
it if nothing was written since the grant: if it begins right after the last record.  Otherwise an
older incarnation has written more meanwhile, or another one has, and the claim is fenced.
Therefore a grant needs no write of its own, and never lets two incarnations write the same
sequences.

A producer is forgotten if it wrote nothing for `PRODUCERS_KEPT_MS`.  If `PRODUCERS_MAX` are known,
one that was silent for `KEPT_MS` is forgotten for a new one; if there is none, the new one is
refused.  Both times are shorter for names that were made for one writer.  A claim of a forgotten
producer is fenced, unless it begins at 0.

Invariants: in the log, the sequences of a producer are 0, 1, 2, ... without a gap or a repetition;
durable records are in the log.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dlcore.base.config import MIB
from dlcore.base.errors import (
    ConfigurationError,
    InvalidEntryError,
    OverCapacityError,
    ProducerFencedError,
    SequenceGapError,
)
from dlcore.base.ids import DLSN
from dlcore.log.entries.stamp import (
    GENERATED_KEPT_MS,
    GENERATED_PREFIX,
    KEPT_MS,
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

    from dlcore.log.entries.stamp import Mark
    from dlcore.log.writing.port import MarkedRows

_Ticket = TypeVar("_Ticket")

PRODUCERS_MAX = 10_000
GENERATED_FORGOTTEN_MS = KEPT_MS
"""A log forgets producers whose names were made for one writer after this silence."""
_SNAPSHOT_BYTES = 8 * MIB
_SNAPSHOT_ENTRIES = 1024
"""After this much of either the next entry has a snapshot, if that is a small part of it."""
_SNAPSHOT_SHARE = 16
_ROW_BYTES = 48
"""Bytes of a row of a snapshot beside its name."""


@dataclass(slots=True)
class _Producer(Generic[_Ticket]):
    """A producer; `claim` is that of the incarnation that may write."""

    number: int
    claim: Claim
    used_ms: int
    accepted: int
    logged: int
    durable: int
    logged_claim: Claim | None = None  # as it is in the log since the last snapshot
    logged_dlsn: DLSN | None = None
    durable_dlsn: DLSN | None = None
    in_flight: deque[tuple[int, _Ticket]] | None = None
    # The last sequence of each batch that is not durable, in order.  Most producers have none,
    # and an empty deque is as large as all other fields.


@dataclass(frozen=True, slots=True)
class Fresh:
    """These records must be written, except the first `known` of them."""

    known: int


@dataclass(frozen=True, slots=True)
class InFlight(Generic[_Ticket]):
    """They are accepted, and will be durable together with the records of the ticket.

    The ticket's records contain the last of them, so repeated records are answered in order.
    `is_last`: the last of them is also the last of the ticket's.
    """

    ticket: _Ticket
    is_last: bool


@dataclass(frozen=True, slots=True)
class Durable:
    """They are durable; the position of the last one may be forgotten."""

    dlsn: DLSN | None


class Producers(Generic[_Ticket]):
    """The producers of a log; a `_Ticket` identifies an accepted batch."""

    def __init__(self, *, producers_max: int = PRODUCERS_MAX) -> None:
        self._producers_max = producers_max
        self._known: dict[str, _Producer[_Ticket]] = {}
        self._numbers: dict[int, str] = {}
        self._next_number = 0
        # For the extent being written: the newest snapshot, and the bytes after it.
        self._segment = -1
        self._snapshot = 0
        self._bytes_since = 0
        self.has_stamped = False
        """Whether the extent being written has a stamped entry; then its last one is stamped."""

    def __repr__(self) -> str:
        return f"<Producers {len(self._known)}>"

    def __len__(self) -> int:
        return len(self._known)

    # Incarnations

    def grant(self, name: str, token: bytes, *, now_ms: int) -> Claim:
        """Begin an incarnation of a producer: earlier ones may write nothing more.

        It writes after all accepted records, which must be durable before the claim is returned to
        the client.

        Raises:
            ConfigurationError: the name is not valid.
            OverCapacityError: there are too many producers.
        """
        known = self._known.get(name)
        if known is None:
            return self._add(Claim(name=name, epoch=1, base=0, token=token), now_ms)
        epoch, base = known.claim.epoch + 1, known.accepted + 1
        known.claim = Claim(name=name, epoch=epoch, base=base, token=token)
        return known.claim

    def continue_with(self, claim: Claim, *, now_ms: int) -> int:
        """Let an incarnation continue; return the last durable sequence of its producer.

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
            known.claim = claim  # an earlier owner granted it
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
        # One with records in flight must stay: their acknowledgement looks it up.
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

    def known_of(self, name: str) -> tuple[Claim, int] | None:
        """Return a producer's claim and its last accepted sequence; None if it is not known."""
        known = self._known.get(name)
        return None if known is None else (known.claim, known.accepted)

    def look_at(self, claim: Claim, first: int, count: int) -> Fresh | InFlight[_Ticket] | Durable:
        """Return how to treat `count` records, at least one, which begin with sequence `first`.

        Raises:
            ProducerFencedError: another incarnation writes.
            SequenceGapError: they do not follow the accepted ones.
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
        """Note that fresh records were passed to the writer."""
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
        rows: Sequence[MarkedRows[Mark]],
        *,
        lssn: int,
        entry_id: int,
        size_bytes: int,
        now_ms: int,
        is_first: bool = False,
        is_last: bool = False,
    ) -> bytes:
        """Return the stamp of the log's next entry, which holds these rows; b"" for none.

        `is_first`: it is the first entry of an extent; others' extents may come before it in the
        segment.  `is_last`: it is the last one of this owner, and the next owner will soon read it.
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
            # A producer without a record in the log is in no snapshot; its first record brings the
            # claim.
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
        self, rows: Iterable[MarkedRows[Mark]], lssn: int, entry_id: int
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
        """Apply the stamp of an entry of the log; the first one must have a snapshot.

        Raises:
            InvalidEntryError: it does not follow the known state.
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
                    self._forget(known)  # the owner had forgotten it too, before it came again
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
    """Return the time until which a producer may send again and is not forgotten for others."""
    if producer.accepted < 0:
        return 0
    is_generated = producer.claim.name.startswith(GENERATED_PREFIX)
    return producer.used_ms + (GENERATED_KEPT_MS if is_generated else KEPT_MS)
