"""The proxy's half of the producer protocol, from events to effects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    ConditionFailedError,
    ConfigurationError,
    LogElsewhereError,
    ProducerFencedError,
    SequenceGapError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.flight.producer_server import (
    PARTING_S,
    Accepted,
    After,
    AwaitEnd,
    BatchDurable,
    BatchFailed,
    BeginProducer,
    Begun,
    Call,
    EndStream,
    LogEnding,
    LoseLog,
    ProducerServer,
    Received,
    Refused,
    Reply,
    ServerState,
    Signal,
    Write,
)
from dlcore.flight.put import Numbered, PutDecoder, PutMessage, PutTarget
from dlcore.flight.replies import Draining, End, PutReply, Ready
from dlcore.flight.sending import framed, schema_message
from dlcore.log.entries.body import batch_of, byte_log_schema
from dlcore.log.entries.stamp import Claim, Mark

if TYPE_CHECKING:
    from collections.abc import Sequence

CLAIM = Claim(name="p", epoch=1, base=0, token=bytes(8))
READY = Ready(log="clicks", window_records=4, window_bytes=10**6, message_bytes_max=10**6)
MOVED = LogElsewhereError("it is elsewhere", location="grpc://two:1")
LOST = WriteError("the log is lost")
AT = DLSN(1, 0, 0)


def message(records: int = 1, sequence: int | None = None) -> Received:
    """Return the event of a message with records."""
    beside = b"" if sequence is None else msgspec.json.encode(Numbered(sequence))
    batch = batch_of([0] * records, [b"x"] * records)
    return Received(PutMessage.parse(framed(batch.serialize(), beside)))


class Harness:
    """A machine that is validated after each event."""

    def __init__(self, **target: Any) -> None:
        first = PutMessage.parse(schema_message(byte_log_schema()))
        self.machine = ProducerServer(PutTarget("clicks", **target), PutDecoder(first), READY)

    def tell(self, *events: Any) -> list[Any]:
        """Handle events; return all effects."""
        effects: list[Any] = []
        for event in events:
            effects += self.machine.handle(event)
            self.machine.validate()
        return effects

    def begun(self) -> Harness:
        """Return this machine with its stream begun, which the client knows."""
        self.tell(Signal.BEGIN, Signal.REPLIED)
        return self

    def accept(self, records: int = 1) -> list[Any]:
        """Receive a message, and let the log accept it."""
        return self.tell(message(records), Accepted(records, 0.0))

    @property
    def state(self) -> ServerState:
        """The state of the machine."""
        return self.machine.state


def acked(effects: Sequence[Any]) -> list[int | None]:
    """Return the acknowledged numbers of the replies."""
    return [each.reply.acked for each in effects if isinstance(each, Reply)]


def test_a_stream_without_a_producer() -> None:
    """It is ready at once; batches are written, acknowledged when they are durable, and it ends."""
    server = Harness()
    assert server.tell(Signal.BEGIN) == [Reply(PutReply(ready=READY)), Call.RECEIVE]
    (write,) = server.tell(message(2))
    assert (write.batch.num_rows, write.mark, write.expected) == (2, None, msgspec.UNSET)
    assert server.tell(Accepted(2, 0.0)) == [Call.RECEIVE]
    assert server.tell(BatchDurable(AT)) == []  # the client does not know of the stream yet
    assert server.tell(Signal.REPLIED) == [Reply(PutReply(acked=2, dlsn="1:0:0"))]
    server.accept()
    assert server.tell(Signal.ALL_SENT) == []
    assert server.tell(Signal.REPLIED) == []
    assert acked(server.tell(BatchDurable(None))) == [3]
    assert server.tell(Signal.REPLIED) == [EndStream(None)]
    assert repr(server.machine) == "<ProducerServer ENDED <StreamAcks durable=3 pending=0 sent=3>>"


def test_empty_batches_are_skipped() -> None:
    """No client learns of them."""
    server = Harness().begun()
    assert server.tell(message(0)) == [Call.RECEIVE]


def test_a_producer_begins_and_goes_on() -> None:
    """Its sequence is that of the log, unless a first message says where it begins."""
    server = Harness(producer="p", positions=True)
    assert server.tell(Signal.BEGIN) == [BeginProducer("p")]
    reply, receive = server.tell(Begun(CLAIM, 6))
    ready = reply.reply.ready
    assert (ready.producer, ready.sequence, receive) == (CLAIM, 6, Call.RECEIVE)
    server.tell(Signal.REPLIED)
    (write,) = server.tell(message(2))
    assert write.mark == Mark(CLAIM, 7)
    server.tell(Accepted(2, 0.0))
    (write,) = server.tell(message(1, sequence=9))
    assert write.mark == Mark(CLAIM, 9)
    server.tell(Accepted(1, 0.0))
    (reply,) = server.tell(BatchDurable(DLSN(1, 0, 1)))
    assert reply.reply.ends == [End(2, "1:0:1", 2)]
    assert server.tell(message(1, sequence=11)) == []
    server.tell(Signal.REPLIED)
    (reply,) = server.tell(BatchDurable(AT))
    (end,) = server.tell(Signal.REPLIED)
    assert isinstance(end.error, SequenceGapError)
    assert end.error.expected == 10
    other = Harness(producer=CLAIM)
    other.tell(Signal.BEGIN, Begun(CLAIM, 6))
    (write,) = other.tell(message(1, sequence=5))  # it is sent again
    assert write.mark == Mark(CLAIM, 5)


def test_a_producer_may_be_refused() -> None:
    """Then nothing is received."""
    server = Harness(producer="p")
    fenced = ProducerFencedError("another one writes")
    assert server.tell(Signal.BEGIN, Refused(fenced)) == [BeginProducer("p"), EndStream(fenced)]


def test_the_window_bounds_what_is_accepted() -> None:
    """The next message is received when a batch is durable."""
    server = Harness().begun()
    assert server.accept(3)[-1] is Call.RECEIVE
    assert isinstance(server.accept(3)[-1], Write)
    assert server.tell(BatchDurable(AT))[-1] is Call.RECEIVE


def test_acknowledgements_gather_while_one_is_sent() -> None:
    """And say how long batches waited for rates."""
    server = Harness().begun()
    for _ in range(3):
        server.tell(message(), Accepted(1, 0.0015))
    (reply,) = server.tell(BatchDurable(AT))
    assert (reply.reply.acked, reply.reply.throttled_ms) == (1, 5)
    assert server.tell(BatchDurable(AT), BatchDurable(AT)) == []
    (reply,) = server.tell(Signal.REPLIED)
    assert (reply.reply.acked, reply.reply.throttled_ms) == (3, 0)
    assert server.tell(Signal.REPLIED) == []


def test_a_message_that_is_refused_ends_the_stream_after_what_was_accepted() -> None:
    """Whether it is invalid, or could not be written."""
    busy = ConfigurationError("no")
    for event in (Received(PutMessage.parse(framed_garbage())), Refused(busy)):
        server = Harness().begun()
        server.accept()
        assert server.tell(event) == []
        assert acked(server.tell(BatchDurable(AT))) == [1]
        (end,) = server.tell(Signal.REPLIED)
        assert isinstance(end.error, ConfigurationError)
        assert end.error.__traceback__ is None
    server = Harness().begun()
    server.tell(message())
    assert server.tell(Refused(busy)) == [EndStream(busy)]


def framed_garbage() -> bytes:
    """Return a message that is no batch."""
    return schema_message(byte_log_schema())


# The end of the log


def test_a_released_log_drops_what_comes() -> None:
    """Accepted batches are acknowledged; the client learns of it and ends: it knows the rest."""
    server = Harness().begun()
    server.accept(4)
    assert server.state is ServerState.TAKING
    assert server.tell(LogEnding(MOVED, is_lost=False)) == [Call.RECEIVE]
    assert server.tell(message()) == [Call.RECEIVE]
    assert acked(server.tell(BatchDurable(AT))) == [4]
    draining, after = server.tell(Signal.REPLIED)
    assert draining == Reply(PutReply(draining=Draining("grpc://two:1")))
    assert after == After(PARTING_S)
    assert server.tell(Signal.REPLIED, Signal.ALL_SENT) == [EndStream(MOVED)]
    assert server.tell(Signal.PARTING_OVER) == []


def test_a_stream_to_a_released_log_may_end_well() -> None:
    """If nothing came after the release."""
    for is_final in (False, True):
        server = Harness().begun()
        server.accept()
        server.tell(LogEnding(WriteError("released"), is_lost=False))
        effects = [] if is_final else server.tell(Signal.ALL_SENT)
        effects += server.tell(BatchDurable(AT), Signal.REPLIED)
        if is_final:
            assert effects[1] == Reply(PutReply(draining=Draining(None)))
            effects = server.tell(Signal.REPLIED, Signal.ALL_SENT)
        assert effects[-1] == EndStream(None)
        assert server.tell(LogEnding(LOST, is_lost=True)) == []


def test_a_client_that_does_not_end_a_released_stream_is_left() -> None:
    """After some time."""
    server = Harness().begun()
    server.tell(LogEnding(MOVED, is_lost=False), Signal.REPLIED)
    assert server.tell(Signal.PARTING_OVER) == [EndStream(MOVED)]
    assert server.tell(message()) == []


@pytest.mark.parametrize("error", [MOVED, AlreadyClosedError("it was closed")])
def test_a_batch_that_waited_for_a_released_log_is_dropped(error: Exception) -> None:
    """Another error refuses it."""
    server = Harness().begun()
    server.tell(message(), LogEnding(MOVED, is_lost=False))
    assert server.tell(Refused(error)) == [Call.RECEIVE]  # type: ignore[arg-type]
    assert server.tell(Signal.REPLIED, Signal.ALL_SENT) == [EndStream(MOVED)]
    server = Harness().begun()
    server.tell(message(), LogEnding(MOVED, is_lost=False), Signal.REPLIED)
    other = ConfigurationError("no")
    assert server.tell(Refused(other)) == [EndStream(other)]


def test_a_batch_that_is_accepted_during_the_release_is_acknowledged() -> None:
    """Also after the client has learned of it."""
    server = Harness().begun()
    server.tell(message(), LogEnding(MOVED, is_lost=False), Signal.REPLIED)
    assert server.state is ServerState.PARTING
    assert server.tell(Accepted(1, 0.0), Signal.ALL_SENT) == [Call.RECEIVE]
    assert acked(server.tell(BatchDurable(AT))) == [1]
    assert server.tell(Signal.REPLIED) == [EndStream(None)]


def test_a_lost_log_ends_its_streams_at_once() -> None:
    """In every state; what is not acknowledged may be in it."""
    for step in range(5):
        server = Harness(**({"producer": "p"} if not step else {}))
        server.tell(Signal.BEGIN)
        if step:
            server.tell(Signal.REPLIED)
            server.accept()
        if step == 2:
            server.tell(Signal.ALL_SENT)
        if step > 2:
            server.tell(LogEnding(MOVED, is_lost=False))
        if step > 3:
            server.tell(BatchDurable(AT), Signal.REPLIED, Signal.REPLIED)
        assert server.tell(LogEnding(LOST, is_lost=True)) == [EndStream(LOST)]
        assert server.tell(Begun(CLAIM, 0) if not step else Signal.REPLIED) == []


def test_a_batch_that_fails_loses_the_log() -> None:
    """Once; so does an error of the writer when a batch is handed over, unless it was released."""
    failed = WriteError("no quorum")
    server = Harness().begun()
    server.accept()
    server.accept()
    assert server.tell(BatchFailed(failed)) == [LoseLog(failed)]
    assert server.tell(BatchFailed(failed)) == []
    assert server.tell(LogEnding(LOST, is_lost=True)) == [EndStream(LOST)]
    for error in (failed, AlreadyClosedError("it was closed")):
        server = Harness().begun()
        server.tell(message())
        assert server.tell(Refused(error)) == [LoseLog(error)]
    server = Harness().begun()
    server.tell(message(), LogEnding(LOST, is_lost=True))
    assert server.tell(Refused(ConfigurationError("late"))) == []


def test_a_loss_comes_before_a_refusal() -> None:
    """A client that is refused believes that all that was taken before is acknowledged."""
    server = Harness().begun()
    server.accept()
    assert server.tell(message(), Refused(ProducerFencedError("forgotten")))[1:] == []
    assert server.tell(LogEnding(LOST, is_lost=True)) == [EndStream(LOST)]


def test_a_log_that_is_released_before_the_producer_begins() -> None:
    """Its client learns of it after it is ready."""
    server = Harness(producer="p")
    assert server.tell(Signal.BEGIN, LogEnding(MOVED, is_lost=False)) == [BeginProducer("p")]
    server.tell(Begun(CLAIM, -1))
    assert server.state is ServerState.DRAINING
    assert server.tell(Signal.REPLIED)[0].reply.draining == Draining("grpc://two:1")


# Conditional writes


def conditional() -> Harness:
    """Return a machine whose batch waits for the end of the stream."""
    server = Harness(expected="1:0:0").begun()
    (awaiting,) = server.tell(message(2))
    assert isinstance(awaiting, AwaitEnd)
    return server


def test_a_conditional_write_waits_for_the_end_of_the_stream() -> None:
    """It is one message."""
    server = conditional()
    (write,) = server.tell(Signal.ALL_SENT)
    assert (write.expected, write.batch.num_rows) == (AT, 2)
    assert server.tell(Accepted(2, 0.0)) == [Call.RECEIVE]
    assert server.tell(Signal.ALL_SENT) == []
    assert acked(server.tell(BatchDurable(DLSN(1, 1, 1)))) == [2]
    assert server.tell(Signal.REPLIED) == [EndStream(None)]
    size_bytes = len(message().message.body)
    assert Harness(expected=None).begun().tell(message()) == [AwaitEnd(size_bytes)]


def test_a_conditional_write_of_two_messages_is_refused() -> None:
    """And one whose condition does not hold."""
    (end,) = conditional().tell(message())
    assert "comes in one message" in str(end.error)
    server = conditional()
    failed = ConditionFailedError("it is elsewhere")
    assert server.tell(Signal.ALL_SENT, Refused(failed))[-1] == EndStream(failed)


def test_a_conditional_write_is_dropped_when_the_log_is_released() -> None:
    """Nothing of it is written."""
    server = conditional()
    server.tell(LogEnding(MOVED, is_lost=False), Signal.REPLIED)
    assert server.tell(Signal.ALL_SENT) == [EndStream(MOVED)]
