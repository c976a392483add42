"""Clients of proxies: producers, which send again what was not acknowledged, and readers.

They know locations, and nothing else of the cluster.  One that gets no answer for a while tries
another location; a reader goes on where the last message said.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dlcore.base.errors import (
    AlreadyTruncatedError,
    ConditionFailedError,
    DLError,
    LogElsewhereError,
    ProducerFencedError,
    ProxyUnavailableError,
    SequenceGapError,
)
from dlcore.base.ids import DLSN
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.put import UNREACHABLE_MAX, PutDecoder, PutMessage
from dlcore.flight.sending import batch_message, schema_message
from dlcore.flight.tickets import Place, Ticket
from tests.simulation.calls import End
from tests.simulation.life_checkers import require
from tests.simulation.proxy_checkers import LEADS_ON, Delivered
from tests.simulation.remote_checkers import AS_IN_THE_LOG

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.simulation.calls import Call
    from tests.simulation.proxies import Proxies
    from tests.simulation.proxy_checkers import Stream

PATIENCE_S = 3.0
QUIET_S = 20.0
"""A call that says nothing for so long is broken: a client cannot know whether its proxy is gone.
A proxy that stages needs several answers of a slow metadata store before it says anything."""
_RECORDS_MAX = 150
"""The names of one producer."""
_TELLING_SHARE = 0.6
_COLUMNS = ("value", "dlsn", "txid", "sequence_id", "timestamp", "log")
SCHEMA = pa.schema([("value", pa.binary())])


def first_message(command: dict[str, object]) -> bytes:
    """Return how a DoPut begins that says what it is for."""
    message = pb.FlightData.FromString(schema_message(SCHEMA))
    target = pb.FlightDescriptor(type=pb.FlightDescriptor.CMD, cmd=json.dumps(command).encode())
    message.flight_descriptor.CopyFrom(target)
    return message.SerializeToString()


def payload_message(payloads: list[bytes], beside: dict[str, object] | None) -> bytes:
    """Return records as they are sent, and what goes beside them."""
    rows = pa.record_batch({"value": payloads})
    message = pb.FlightData.FromString(batch_message(rows, DLSN.INITIAL))
    message.ClearField("app_metadata")
    if beside is not None:
        message.app_metadata = json.dumps(beside).encode()
    return message.SerializeToString()


class Producer:
    """Writes numbered records to one log, each until it is acknowledged.

    One that `tells` the numbers goes on with its incarnation, or begins a new one.
    """

    def __init__(self, proxies: Proxies, name: str, log: str, log_id: str) -> None:
        self.name = name
        self._proxies = proxies
        self._rng = proxies.rng
        self._log = log
        self._produced = proxies.checkers.new_producer(log_id, name)
        self._waiting: dict[int, None] = {}
        self._count = 0
        self._streams = 0
        self._location: str | None = None
        self._asked_at = ""
        self._unreached: dict[str, None] = {}
        self._tells = proxies.rng.random() < _TELLING_SHARE
        self._claim: dict[str, object] | None = None

    async def run(self) -> None:
        """Write, until the end is near and all is acknowledged."""
        while not self._proxies.is_ending or self._waiting:
            try:
                await self._write_some()
            except LogElsewhereError as error:
                self._location = error.location
                self._proxies.count("redirect")
            except ProducerFencedError as error:
                self._claim = None
                self._proxies.note(self.name, f"{type(error).__name__}: {error}")
            except SequenceGapError as error:
                self._produced.on_gap(error)
            except (DLError, TimeoutError) as error:
                if isinstance(error, (ProxyUnavailableError, TimeoutError)):
                    self._unreached[self._asked_at] = None
                self._proxies.note(self.name, f"{type(error).__name__}: {error}")
            await asyncio.sleep(self._rng.expovariate(5.0))

    async def _write_some(self) -> None:
        location = self._location or self._proxies.some_location()
        self._location, self._asked_at = None, location
        self._streams += 1
        stream = self._proxies.checkers.new_stream(self._produced, self._log)
        call = self._proxies.at(location).put(self.name)
        try:
            call.send(self._first())
            message = await asyncio.wait_for(call.take(), PATIENCE_S)
            if isinstance(message, End):
                self._check_end(message, location)
                return
            self._unreached.clear()
            if self._tells:
                self._begin(json.loads(message.app_metadata)["ready"])
            hearing = asyncio.ensure_future(self._hear(call, stream))
            try:
                await self._send_all(call, stream, hearing)
                await asyncio.wait([hearing], timeout=PATIENCE_S)
                if hearing.done():
                    self._check_end(hearing.result(), location)
                    stream.on_good_end()
            except ConditionFailedError as error:
                self._on_refused(stream, error)
            finally:
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)
        finally:
            call.cancel()

    def _on_refused(self, stream: Stream, error: ConditionFailedError) -> None:
        """A condition does not hold."""
        raise AssertionError("it had none") from error

    def _check_end(self, end: End, location: str) -> None:
        """P4: a client is never sent on to where it asked.  Raises: the error that ended the
        call."""
        if isinstance(end.error, LogElsewhereError):
            require(
                LEADS_ON,
                holds=end.error.location != location,
                message=f"{self.name} asked {location}, and got: {end.error}",
            )
        if end.error is not None:
            raise end.error

    def _first(self) -> bytes:
        command = self._command()
        if self._tells:
            if self._rng.random() < 0.1:
                self._claim = None
            command["producer"] = self._claim or self.name
        if self._unreached:
            command["unreachable"] = list(self._unreached)[-UNREACHABLE_MAX:]
        if command:
            return first_message({"log": self._log, **command})
        message = pb.FlightData.FromString(schema_message(SCHEMA))
        target = pb.FlightDescriptor(type=pb.FlightDescriptor.PATH, path=[self._log])
        message.flight_descriptor.CopyFrom(target)
        return message.SerializeToString()

    def _command(self) -> dict[str, object]:
        """Return what a stream says beside its log."""
        return {}

    def _begin(self, ready: dict[str, Any]) -> None:
        """Go on behind what is durable."""
        self._claim = ready["producer"]
        durable = [number for number in self._waiting if number <= ready["sequence"]]
        self._produced.on_durable((number, self._payload(number)) for number in durable)
        for number in durable:
            del self._waiting[number]

    def _on_acknowledged(self, dlsn: DLSN | None) -> None:
        """More is durable, the last of it at a position, which may not be known any more."""

    async def _send_all(self, call: Call, stream: Stream, hearing: asyncio.Future[End]) -> None:
        """Send what waits, and more; then say that this is all, or not."""
        rng = self._rng
        pause_s = rng.choice((0.0, 0.05, 0.2))
        if not self._proxies.is_ending:
            fresh = min(rng.choice((0, 2, 6, 30)), _RECORDS_MAX - self._count)
            self._waiting |= dict.fromkeys(range(self._count, self._count + fresh))
            self._count += fresh
        numbers = list(self._waiting)
        while numbers and not hearing.done():
            await asyncio.wait_for(call.room(), PATIENCE_S)
            if call.has_sent_all:
                return
            size = rng.choice((1, 1, 4))
            batch, numbers = numbers[:size], numbers[size:]
            self._send(call, stream, batch)
            if pause_s and rng.random() < 0.7:
                await asyncio.sleep(rng.expovariate(1 / pause_s))
        if self._proxies.is_ending or rng.random() < 0.8:
            call.done_writing()

    def _send(self, call: Call, stream: Stream, numbers: list[int]) -> None:
        records = [(number, self._payload(number)) for number in numbers]
        beside: dict[str, object] | None = {"sequence": numbers[0]} if self._tells else None
        stream.on_send(records)
        call.send(payload_message([payload for _, payload in records], beside))

    def _payload(self, number: int) -> bytes:
        return f"{self.name}/{number}/{0 if self._tells else self._streams}".encode()

    async def _hear(self, call: Call, stream: Stream) -> End:
        """Take the answers, to the end of the stream."""
        while True:
            message = await call.take()
            if isinstance(message, End):
                return message
            reply = json.loads(message.app_metadata)
            if "draining" in reply:
                call.done_writing()
                continue
            dlsn = reply["dlsn"] and DLSN.parse(reply["dlsn"])
            for number in stream.on_ack(reply["acked"], dlsn):
                del self._waiting[number]
            self._on_acknowledged(dlsn)


class Reader:
    """Reads logs through proxies, from anywhere, and follows them."""

    def __init__(self, proxies: Proxies, name: str, log_ids: Mapping[str, str]) -> None:
        self.name = name
        self._proxies = proxies
        self._rng = proxies.rng
        self._log_ids = log_ids
        self._logs = proxies.log_checkers

    async def run(self) -> None:
        """Read, until the end is near; then all that there is."""
        while not self._proxies.is_ending:
            log = self._rng.choice(sorted(self._log_ids))
            await self._read(log, self._some_ticket(log), streams=self._rng.choice((1, 2, 5)))
            await asyncio.sleep(self._rng.expovariate(5.0))
        for log in sorted(self._log_ids):
            await self._read(log, Ticket(log=log), streams=None)

    def _some_ticket(self, log: str) -> Ticket:
        """Return what to ask for: from anywhere, to anywhere or without an end."""
        rng = self._rng
        known = list(self._logs.known(self._log_ids[log]).values())
        places: list[Place] = [Place(latest=True)]
        end = None
        if known:
            dlsn, sequence_id, txid, _ = rng.choice(known)
            places += [Place(dlsn=str(dlsn)), Place(sequence_id=sequence_id), Place(txid=txid)]
            if rng.random() < 0.2:
                end = Place(dlsn=str(rng.choice(known)[0]))
        return Ticket(
            log=log,
            start=rng.choice((None, places[0], *places)),
            end=end,
            follow=rng.random() < 0.8,
            columns=rng.choice((None, None, list(_COLUMNS))),
        )

    async def _read(self, log: str, ticket: Ticket, *, streams: int | None) -> None:
        """Read what a ticket names, over so many streams at most; None: until all was read."""
        log_id, start = self._log_ids[log], ticket.start
        at = _dlsn_of(start) or DLSN.INITIAL
        reading = self._logs.new_reading(log_id, log, at, promise=AS_IN_THE_LOG)
        delivered = Delivered(
            reading,
            log_id,
            txid=None if start is None else start.txid,
            sequence_id=None if start is None else start.sequence_id,
            begins_late=start is not None and start.latest,
            end=None
            if ticket.end is None or ticket.end.dlsn is None
            else DLSN.parse(ticket.end.dlsn),
        )
        self._proxies.checkers.new_delivery(delivered)
        left = -1 if streams is None else streams
        while left:
            left -= 1
            floor = reading.floor
            try:
                if await self._take_some(ticket, delivered, is_whole=streams is None):
                    if ticket.end is None and not delivered.begins_late:
                        reading.on_caught_up(floor)
                    return
            except AlreadyTruncatedError:
                reading.on_truncated()
                return
            except (DLError, TimeoutError) as error:
                self._proxies.note(self.name, f"{type(error).__name__}: {error}")
            if delivered.next is not None:
                ticket = Ticket(
                    log=log,
                    start=Place(dlsn=delivered.next),
                    end=ticket.end,
                    follow=ticket.follow,
                    columns=ticket.columns,
                )
            await asyncio.sleep(self._rng.expovariate(5.0))

    async def _take_some(self, ticket: Ticket, delivered: Delivered, *, is_whole: bool) -> bool:
        """Take messages from one proxy; return whether they came to their end."""
        rng = self._rng
        count = 1_000_000 if is_whole else rng.choice((1, 20, 200))
        pause_s = 0.0 if is_whole else rng.choice((0.0, 0.0, 0.1, 1.0))
        proxy = self._proxies.at(self._proxies.some_location())
        call = proxy.get(self.name, ticket.encode())
        decoder: PutDecoder | None = None
        try:
            while count:
                message = await asyncio.wait_for(call.take(), PATIENCE_S)
                if isinstance(message, End):
                    if message.error is not None:
                        raise message.error
                    return True
                data = PutMessage.parse(message)
                if decoder is None:
                    decoder = PutDecoder(data)
                    continue
                count -= 1
                self._on_rows(ticket.log, decoder.decode(data), delivered)
                delivered.next = json.loads(data.data.app_metadata)["next"]
                if pause_s and rng.random() < 0.3:
                    await asyncio.sleep(rng.uniform(0.0, 2 * pause_s))
        finally:
            call.cancel()
        return False

    def _on_rows(self, log: str, batch: pa.RecordBatch, delivered: Delivered) -> None:
        rows: list[dict[str, Any]] = batch.to_pylist()
        for row in rows:
            require(AS_IN_THE_LOG, holds=row["log"] == log, message=f"{log} gave a row of {row}")
            place = DLSN(*row["dlsn"].values())
            written_ms = round(row["timestamp"].timestamp() * 1000)
            delivered.on_record(row["value"], place, row["sequence_id"], row["txid"], written_ms)


def _dlsn_of(place: Place | None) -> DLSN | None:
    return None if place is None or place.dlsn is None else DLSN.parse(place.dlsn)
