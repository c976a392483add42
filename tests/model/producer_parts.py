"""Both ends of the producer protocol as parts of a model: a client, and a proxy that owns the log.

The machines are the real ones (`dlcore.flight.producer_client`, `dlcore.flight.producer_server` and
`dlcore.log.proxied.producers`).  A part performs their effects: at once, or as outputs.  Messages
are the bytes that go over the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, assert_never

import msgspec

from dlcore.base import errors
from dlcore.base.errors import DLError, ProducerFencedError, SequenceGapError, WriteError
from dlcore.base.ids import DLSN
from dlcore.flight import producer_client as client, producer_server as server
from dlcore.flight.put import PutDecoder, PutMessage, PutTarget
from dlcore.flight.replies import PutReply, Ready
from dlcore.flight.sending import schema_message
from dlcore.log.entries.body import batch_of, byte_log_schema
from dlcore.log.entries.stamp import Claim, Mark
from dlcore.log.proxied.producers import Fresh, InFlight, Producers
from dlcore.log.writing.port import MarkedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

READY = Ready(log="log", window_records=2**30, window_bytes=2**30, message_bytes_max=2**20)
AT = DLSN(1, 0, 0)
"""The position of every record: none is compared."""


class Entry(NamedTuple):
    """An entry of the log; `rows` has of each record its producer, sequence and payload."""

    lssn: int
    entry_id: int
    stamp: bytes
    rows: tuple[tuple[str, int, bytes], ...]
    written_ms: int


# Inputs of a client.


@dataclass(frozen=True, slots=True)
class Begin:
    """The client opens its first stream, or the next one after a pause."""

    now: float


@dataclass(frozen=True, slots=True)
class Heard:
    """A reply arrives."""

    reply: bytes
    now: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream has ended, with an error of this name."""

    error: str


# Outputs of a client, beside bytes: messages on its stream.


@dataclass(frozen=True, slots=True)
class Opens:
    """It opens a stream for this target."""

    target: bytes


@dataclass(frozen=True, slots=True)
class Ends:
    """It sends no more on its stream."""


@dataclass(frozen=True, slots=True)
class Closes:
    """It has cancelled its stream."""


class ClientEnd:
    """A client that writes some records, one a message, and closes when all are durable."""

    def __init__(self, number: int, records: int, *, is_named: bool) -> None:
        self.payloads = [b"%d.%d" % (number, each) for each in range(records)]
        name = "named" if is_named else f"_{number}"
        self.machine: client.ProducerClient[int] = client.ProducerClient(
            "log", name, is_named=is_named
        )
        self.acked: list[int] = []
        self.has_written = self.is_paused = self.has_ended = False
        self.failed_with: DLError | None = None
        self._outputs: list[Any] = []

    def take(self, event: Any) -> Sequence[Any]:
        """Handle an input; return messages and what becomes of the stream."""
        outputs = self._outputs
        match event:
            case Begin(now):
                is_first, self.is_paused = not self.is_paused, False
                self._handle(client.Begin(now) if is_first else client.RetryDue(now), now)
            case Heard(reply, now):
                decoded = msgspec.json.decode(reply, type=PutReply)
                self._handle(client.Replied(decoded, now), now)
            case Lost(name):
                error = getattr(errors, name)("the stream has ended")
                again = not isinstance(error, ProducerFencedError)
                self._handle(client.StreamEnded(error, again), 0.0)
        self._outputs = []
        return outputs

    def _handle(self, event: Any, now: float) -> None:
        effects = self.machine.handle(event)
        self.machine.validate()
        for effect in effects:
            self._perform(effect, now)

    def _perform(  # noqa: C901 - one case for each kind
        self, effect: client.Effect[int], now: float
    ) -> None:
        match effect:
            case client.Call.SEND_SOON:
                self._handle(client.SendDue(now), now)
            case client.Call.OPENED:
                if not self.has_written:
                    self.has_written = True
                    for number, payload in enumerate(self.payloads):
                        write = client.WriteBatch(batch_of([0], [payload]), number)
                        self._handle(write, now)
            case client.Call.END_SENDING:
                self._outputs.append(Ends())
            case client.Call.CLOSE_STREAM:
                self._outputs.append(Closes())
            case client.OpenStream(producer):
                target = PutTarget("log", producer=producer, positions=True)
                self._outputs.append(Opens(msgspec.json.encode(target)))
            case client.Send(data):
                self._outputs.append(data)
                self._handle(client.Sent(now), now)
            case client.Progress(answers):
                self.acked += [ticket for ticket, _ in answers]
                if len(self.acked) == len(self.payloads):
                    self._handle(client.Close(now), now)
            case client.After():
                pass
            case client.Retry():
                self.is_paused = True
            case client.Ended(error):
                self.has_ended, self.failed_with = True, error
            case _:
                assert_never(effect)


# Inputs of an owner.  `owns` is whether it still owns the log: a refusal by what only this proxy
# knows is verified before it is sent (`OwnedLog`).


@dataclass(frozen=True, slots=True)
class Opened:
    """A client opens a stream."""

    stream: int
    target: bytes
    owns: bool
    now: float


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message arrives, or the end of the client's half (None)."""

    stream: int
    data: bytes | None
    owns: bool
    now: float


@dataclass(frozen=True, slots=True)
class Gone:
    """The client has cancelled its stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class PartingOver:
    """The time is over that a client had to end its stream to a released log."""

    stream: int


@dataclass(frozen=True, slots=True)
class Flush:
    """All that is accepted becomes an entry, with records of others that have no producer."""

    now: float


@dataclass(frozen=True, slots=True)
class Stored:
    """The oldest entry is durable."""


@dataclass(frozen=True, slots=True)
class LostLog:
    """Another proxy has taken the log, and this one hears of it."""


@dataclass(frozen=True, slots=True)
class Release:
    """It gives the log away in order."""


# Outputs of an owner.


@dataclass(frozen=True, slots=True)
class Replies:
    """It sends a reply."""

    stream: int
    reply: bytes


@dataclass(frozen=True, slots=True)
class Over:
    """It ends a stream, with an error of this name or in order."""

    stream: int
    error: str


OwnerOutput: TypeAlias = Replies | Over


class _Sent(NamedTuple):
    mark: Mark
    payloads: tuple[bytes, ...]
    ticket: int


class _Flying(NamedTuple):
    entry: Entry
    parts: tuple[_Sent, ...]


class _Stream:
    def __init__(self, target: PutTarget) -> None:
        decoder = PutDecoder(PutMessage.parse(schema_message(byte_log_schema())))
        self.machine = server.ProducerServer(target, decoder, READY)
        self.waits: list[int] = []  # tickets of accepted batches that are not durable
        self.claim: Claim | None = None  # granted, once earlier records are durable


class OwnerEnd:
    """A proxy that owns the log, or believes so."""

    def __init__(self, lssn: int, producers: Producers[int]) -> None:
        self.lssn = lssn
        self.producers = producers
        self.queue: list[_Sent] = []  # accepted, and in no entry yet
        self.flying: list[_Flying] = []
        self.streams: dict[int, _Stream] = {}
        self.released: DLError | None = None
        self.is_lost = False
        """Whether it knows that another proxy has taken the log."""
        self._entries = self._tickets = self._tokens = 0
        self._outputs: list[OwnerOutput] = []

    def take(self, event: Any) -> Sequence[OwnerOutput]:  # noqa: C901 - one case for each kind
        """Handle an input; return what is sent to clients."""
        match event:
            case Opened(number, target, owns, now):
                self.streams[number] = _Stream(msgspec.json.decode(target, type=PutTarget))
                self._handle(number, server.Signal.BEGIN, owns, now)
                if self.released is not None:
                    self._handle(number, server.LogEnding(self.released, is_lost=False), owns, now)
            case Arrived(number, data, owns, now):
                received: Any = server.Signal.ALL_SENT
                if data is not None:
                    received = server.Received(PutMessage.parse(data))
                self._handle(number, received, owns, now)
            case Gone(number):
                self.streams.pop(number, None)
            case PartingOver(number):
                self._handle(number, server.Signal.PARTING_OVER)
            case Flush(now):
                self._flush(now)
            case Stored():
                self._store()
            case LostLog():
                self._lose()
            case Release():
                self.released = errors.LogElsewhereError("the log moves")
                for number in list(self.streams):
                    self._handle(number, server.LogEnding(self.released, is_lost=False))
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def is_idle(self) -> bool:
        """Whether all that was accepted is durable."""
        return not self.queue and not self.flying

    def _handle(self, number: int, event: Any, owns: bool = True, now: float = 0.0) -> None:
        stream = self.streams.get(number)
        if stream is None:
            return
        effects = stream.machine.handle(event)
        stream.machine.validate()
        for effect in effects:
            self._perform(number, stream, effect, owns, now)

    def _perform(
        self, number: int, stream: _Stream, effect: server.Effect, owns: bool, now: float
    ) -> None:
        match effect:
            case server.Call.RECEIVE | server.After():
                pass
            case server.Reply(reply):
                self._outputs.append(Replies(number, msgspec.json.encode(reply)))
                self._handle(number, server.Signal.REPLIED, owns, now)
            case server.BeginProducer(producer):
                self._begin(number, stream, producer, owns, now)
            case server.Write():
                self._write(number, stream, effect, owns, now)
            case server.LoseLog():
                self._lose()
            case server.EndStream(error):
                self.streams.pop(number, None)
                name = "ProxyUnavailableError" if error is None else type(error).__name__
                self._outputs.append(Over(number, name))
            case server.AwaitEnd():
                raise AssertionError("no client writes on a condition")
            case _:
                assert_never(effect)

    def _begin(
        self, number: int, stream: _Stream, producer: str | Claim, owns: bool, now: float
    ) -> None:
        now_ms = round(1000 * now)
        if isinstance(producer, Claim):
            try:
                last = self.producers.continue_with(producer, now_ms=now_ms)
            except ProducerFencedError as error:
                self._refuse(number, error, owns, now)
            else:
                self._handle(number, server.Begun(producer, last), owns, now)
            return
        self._tokens += 1
        token = (1000 * self.lssn + self._tokens).to_bytes(8, "big")
        stream.claim = self.producers.grant(producer, token, now_ms=now_ms)
        if self.is_idle:
            self._tell_claims(owns, now)

    def _tell_claims(self, owns: bool, now: float) -> None:
        for number, stream in list(self.streams.items()):
            claim, stream.claim = stream.claim, None
            if claim is not None and owns:
                self._handle(number, server.Begun(claim, claim.base - 1), owns, now)
            elif claim is not None:
                self._lose()

    def _refuse(self, number: int, error: DLError, owns: bool, now: float) -> None:
        if owns:
            self._handle(number, server.Refused(error), owns, now)
        else:
            self._lose()

    def _write(
        self, number: int, stream: _Stream, write: server.Write, owns: bool, now: float
    ) -> None:
        mark, count = write.mark, write.batch.num_rows
        assert mark is not None
        if self.released is not None:
            self._handle(number, server.Refused(self.released), owns, now)
            return
        try:
            found = self.producers.look_at(mark.claim, mark.first, count)
        except (ProducerFencedError, SequenceGapError) as error:
            self._refuse(number, error, owns, now)
            return
        if isinstance(found, Fresh):
            self._tickets += 1
            rows = _payloads(write.batch)[found.known :]
            sent = _Sent(Mark(mark.claim, mark.first + found.known), rows, self._tickets)
            self.queue.append(sent)
            now_ms = round(1000 * now)
            self.producers.accepted(sent.mark, len(rows), sent.ticket, now_ms=now_ms)
            stream.waits.append(sent.ticket)
        elif isinstance(found, InFlight):
            stream.waits.append(found.ticket)
        self._handle(number, server.Accepted(1, 0.0), owns, now)
        if not isinstance(found, Fresh | InFlight):
            self._handle(number, server.BatchDurable(found.dlsn), owns, now)

    def _flush(self, now: float) -> None:
        now_ms = round(1000 * now)
        marks = [
            MarkedRows(each.mark, len(each.payloads), slot) for slot, each in enumerate(self.queue)
        ]
        stamp = self.producers.stamp(
            marks, lssn=self.lssn, entry_id=self._entries, size_bytes=0, now_ms=now_ms
        )
        rows = tuple(
            (each.mark.claim.name, each.mark.first + at, payload)
            for each in self.queue
            for at, payload in enumerate(each.payloads)
        )
        entry = Entry(self.lssn, self._entries, stamp, rows, now_ms)
        self.flying.append(_Flying(entry, tuple(self.queue)))
        self._entries += 1
        self.queue = []

    def _store(self) -> None:
        done = self.flying.pop(0).parts
        for part in done:
            self.producers.durable(part.mark, len(part.payloads), AT)
        tickets = {part.ticket for part in done}
        for number, stream in list(self.streams.items()):
            while stream.waits and stream.waits[0] in tickets:
                stream.waits.pop(0)
                self._handle(number, server.BatchDurable(AT))
        if self.is_idle:
            self._tell_claims(owns=True, now=0.0)

    def _lose(self) -> None:
        self.is_lost = True
        for number in list(self.streams):
            self._handle(number, server.LogEnding(WriteError("the log is lost"), is_lost=True))


def _payloads(batch: pa.RecordBatch) -> tuple[bytes, ...]:
    return tuple(batch.column("value").to_pylist())
