"""Invariants of proxies, judged by the answers to their clients and by the logs.

A producer numbers its records, and sends one that was not acknowledged again.  If it does not tell
proxies the numbers, the bytes say in which stream a record was sent, so that every copy of it is a
record of its own to the checkers of logs; else they are the same each time, and may be in the log
once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlcore.base.ids import DLSN
from tests.simulation.life_checkers import require
from tests.simulation.remote_checkers import ACKNOWLEDGED, AS_IN_THE_LOG, SnapshotCheckers
from tests.simulation.subscription_checkers import CONSUMED, SubscriptionCheckers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dlcore.base.errors import SequenceGapError
    from tests.simulation.log_checkers import LogCheckers, Reading, Writing

SENT = "P2 AcksAreOfWhatWasSent"
LEADS_ON = "P4 RedirectsLeadOn"
AT_ITS_PLACE = "P5 ConditionalAppendsAreWholeAtTheirPlace"
PROXY_INVARIANTS = (ACKNOWLEDGED, SENT, AS_IN_THE_LOG, LEADS_ON, AT_ITS_PLACE, CONSUMED)
_ANYWHERE = DLSN(2**62, 0, 0)


@dataclass(frozen=True, slots=True)
class _Known:
    """A record was acknowledged: its bytes, and a position which it is not above."""

    payload: bytes
    at_most: DLSN


@dataclass(slots=True)
class Produced:
    """One producer of one log, and the answers about its records, by their numbers."""

    log_id: str
    name: str
    known: dict[int, _Known] = field(default_factory=dict)
    conditions: dict[tuple[bytes, ...], list[DLSN | None]] = field(default_factory=dict)
    """For records written together: the records that they may follow."""

    def on_durable(self, records: Iterable[tuple[int, bytes]]) -> None:
        """It learns that these are durable, and not where."""
        for number, payload in records:
            self.known.setdefault(number, _Known(payload, _ANYWHERE))

    def on_gap(self, error: SequenceGapError) -> None:
        """P1: it learns that it left something out, and it leaves out what was acknowledged."""
        require(ACKNOWLEDGED, holds=False, message=f"{self.name} learns of a gap: {error}")


@dataclass(slots=True)
class _Condition:
    """For records written together: the record before them, None: they are the log's first."""

    expected: DLSN | None
    acknowledged: DLSN | None
    """The highest position that any client knew when it was asked."""


class Stream:
    """One stream of a producer: what it sent, and what it learns of that."""

    def __init__(self, produced: Produced, writing: Writing, logs: LogCheckers) -> None:
        self._produced = produced
        self._writing = writing
        self._logs = logs
        self._sent: list[tuple[int, bytes]] = []
        self._condition: _Condition | None = None
        self.acked = 0

    def expect(self, last: DLSN | None) -> None:
        """Its next batch shall be written if this is the log's last record."""
        self._condition = _Condition(last, self._logs.acknowledged(self._produced.log_id))

    def on_send(self, records: Sequence[tuple[int, bytes]]) -> None:
        """It is going to send these."""
        payloads = [payload for _, payload in records]
        self._writing.on_write(payloads)
        self._sent += records
        if self._condition is not None:
            places = self._produced.conditions.setdefault(tuple(payloads), [])
            places.append(self._condition.expected)

    def on_refused(self, last: DLSN | None) -> None:
        """P5: another record is the last one, of those that were there; nothing was written."""
        asked = self._condition
        require(
            AT_ITS_PLACE,
            holds=asked is not None
            and last != asked.expected
            and (asked.acknowledged is None or (last is not None and last >= asked.acknowledged))
            and not self.acked,
            message=f"{self._produced.name} learns that the last record is at {last}, and asked "
            f"{asked}",
        )
        payloads = [payload for _, payload in self._sent]
        self._writing.on_never_sent(payloads)
        self._produced.conditions.pop(tuple(payloads))

    def on_ack(self, count: int, dlsn: DLSN | None) -> list[int]:
        """P2: so many of its records are durable; return the numbers of those that were not."""
        require(
            SENT,
            holds=self.acked < count <= len(self._sent),
            message=f"{self._produced.name} sent {len(self._sent)} records, of which {self.acked} "
            f"were acknowledged: now {count} are",
        )
        require(
            AT_ITS_PLACE,
            holds=self._condition is None or count == len(self._sent),
            message=f"{self._produced.name}: {count} of {self._sent} are acknowledged",
        )
        news, self.acked = self._sent[self.acked : count], count
        if dlsn is not None:
            self._writing.on_acknowledged([news[-1][1]], dlsn)
        at = dlsn or _ANYWHERE
        self._produced.known |= {number: _Known(payload, at) for number, payload in news}
        return [number for number, _ in news]

    def on_good_end(self) -> None:
        """P2: what a stream took that ended without an error is durable."""
        require(
            SENT,
            holds=self.acked == len(self._sent),
            message=f"{self._produced.name}: a stream of {len(self._sent)} records ended well, "
            f"{self.acked} were acknowledged",
        )


@dataclass(slots=True)
class Delivered:
    """One reader through proxies: its request, and the positions that it got.

    `txid` or `sequence_id` is what it asked for, if its start was no position; one that
    `begins_late` does so wherever the log ended.
    """

    reading: Reading
    log_id: str
    txid: int | None
    sequence_id: int | None
    begins_late: bool
    end: DLSN | None
    next: str | None = None
    """The position at which it shall go on."""
    got: list[DLSN] = field(default_factory=list)

    def on_record(
        self, payload: bytes, dlsn: DLSN, sequence_id: int, txid: int, timestamp_ms: int
    ) -> None:
        """P3: it gets a record."""
        self.reading.on_record(payload, dlsn, sequence_id, txid, timestamp_ms)
        self.got.append(dlsn)


class ProxyCheckers:
    """Records the answers that clients of proxies get, and judges them when the run is over."""

    def __init__(self, logs: LogCheckers) -> None:
        self.logs = logs
        self._produced: list[Produced] = []
        self._delivered: list[Delivered] = []
        self.delivered_count = 0
        self.subscriptions = SubscriptionCheckers(logs)
        self.snapshots = SnapshotCheckers(logs)

    def new_producer(self, log_id: str, name: str) -> Produced:
        """Begin to judge the answers that a producer gets."""
        self._produced.append(Produced(log_id, name))
        return self._produced[-1]

    def new_stream(self, produced: Produced, log: str) -> Stream:
        """Begin to judge one of its streams."""
        return Stream(produced, self.logs.new_writing(produced.log_id, log), self.logs)

    def new_delivery(self, delivered: Delivered) -> Delivered:
        """Begin to judge a reader."""
        self._delivered.append(delivered)
        return delivered

    def check_whole(self) -> None:
        """Judge all, once everything that there is was read."""
        for produced in self._produced:
            self._check_producer(produced)
            self._check_conditions(produced)
        for delivered in self._delivered:
            self._check_reader(delivered)
        self.subscriptions.check_whole()

    def _check_producer(self, produced: Produced) -> None:
        """P1: what was acknowledged is there, in the order of its numbers, unless truncated."""
        truncated, places = self.logs.truncated(produced.log_id), self.logs.known(produced.log_id)
        before = (-1, DLSN.INITIAL)
        for number, known in sorted(produced.known.items()):
            place = places.get(known.payload)
            if place is None:
                lost = known.at_most >= truncated and (
                    truncated == DLSN.INITIAL or before[1] >= truncated
                )
                message = f"{known.payload!r} was acknowledged, and is not in the log"
                require(ACKNOWLEDGED, holds=not lost, message=f"{produced.name}: {message}")
                continue
            dlsn = place[0]
            require(
                ACKNOWLEDGED,
                holds=before[0] < 0 or before[1] < dlsn,
                message=f"{produced.name}: record {number} is at {dlsn}, and {before[0]} at "
                f"{before[1]}",
            )
            require(
                ACKNOWLEDGED,
                holds=dlsn <= known.at_most,
                message=f"{produced.name}: record {number} is at {dlsn}, and was acknowledged up "
                f"to {known.at_most}",
            )
            before = (number, dlsn)

    def _check_conditions(self, produced: Produced) -> None:
        """P5: they are there together behind a record that was expected, or not at all."""
        truncated, known = self.logs.truncated(produced.log_id), self.logs.known(produced.log_id)
        order = [None, *sorted(place[0] for place in known.values())]
        for payloads, expected in produced.conditions.items():
            places = [known[each][0] for each in payloads if each in known]
            if not places or places[0] < truncated:
                continue
            first = places[0]
            whole = [
                DLSN(first.lssn, first.entry_id, first.slot_id + slot)
                for slot in range(len(payloads))
            ]
            require(
                AT_ITS_PLACE,
                holds=places == whole,
                message=f"{produced.name}: {payloads} are at {places}",
            )
            before = order[order.index(first) - 1]
            require(
                AT_ITS_PLACE,
                holds=before in expected or (before or DLSN.INITIAL) < truncated,
                message=f"{produced.name}: {payloads} are at {places} behind {before}, expected "
                f"{expected}",
            )

    def _check_reader(self, delivered: Delivered) -> None:
        """P3: it got what the log holds from where it began to where it ended, and nothing else."""
        got, log_id = delivered.got, delivered.log_id
        self.delivered_count += len(got)
        if not got:
            return
        truncated = self.logs.truncated(log_id)
        known = sorted(self.logs.known(log_id).values())
        start = got[0] if delivered.begins_late else delivered.reading.start
        wanted = [
            dlsn
            for dlsn, sequence_id, txid, _ in known
            if start <= dlsn <= got[-1]
            and sequence_id >= (delivered.sequence_id or 0)
            and txid >= (delivered.txid if delivered.txid is not None else txid)
        ]
        missed = [dlsn for dlsn in sorted({*wanted} - {*got}) if dlsn >= truncated]
        others = sorted({*got} - {*wanted})
        name = f"a reader from {start} (txid {delivered.txid}, sequence id "
        name += f"{delivered.sequence_id}) to {delivered.end}"
        require(AS_IN_THE_LOG, holds=not missed, message=f"{name} did not get {missed[:3]}")
        require(AS_IN_THE_LOG, holds=not others, message=f"{name} got {others[:3]}")
        require(
            AS_IN_THE_LOG,
            holds=delivered.end is None or got[-1] < delivered.end,
            message=f"{name} got {got[-1]}",
        )
