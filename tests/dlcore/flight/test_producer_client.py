"""The client's half of the producer protocol, from events to effects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow as pa
import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    ConditionFailedError,
    LogElsewhereError,
    LogRecordTooLongError,
    OverCapacityError,
    ProducerFencedError,
    ProxyUnavailableError,
    UnexpectedError,
    WriteCancelledError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.flight.producer_client import (
    SILENCE_S,
    Abort,
    After,
    Begin,
    Call,
    ClientState,
    Close,
    Ended,
    Fail,
    Flush,
    Identity,
    OpenStream,
    ProducerClient,
    Progress,
    PutStream,
    Replied,
    Retry,
    RetryDue,
    Send,
    SendDue,
    Sent,
    SilenceDue,
    StreamEnded,
    WriteBatch,
)
from dlcore.flight.put import PutMessage, sequence_of
from dlcore.flight.replies import Draining, End, PutReply, Ready
from dlcore.log.entries.body import batch_of, byte_log_schema
from dlcore.log.entries.stamp import GENERATED_KEPT_MS, KEPT_MS, Claim

if TYPE_CHECKING:
    from collections.abc import Sequence

CLAIM = Claim(name="_p", epoch=1, base=0, token=bytes(8))
LOST = StreamEnded(ProxyUnavailableError("it is away"), again=True)
FENCED = StreamEnded(ProducerFencedError("it is not known"), again=False)
ROWS = batch_of([1, 2], [b"a", b"b"])


class Write(NamedTuple):
    """A record, which is a call and no event."""

    txid: int
    payload: bytes
    ticket: str


class Harness:
    """A machine that is validated after each event; `now` is the time of events."""

    def __init__(self, name: str = "_p", **options: Any) -> None:
        self.machine: ProducerClient[str] = ProducerClient("clicks", name, **options)
        self.now = 0.0

    def tell(self, *events: Any) -> list[Any]:
        """Handle events; types of events that have only a time get it.  Return all effects."""
        effects: list[Any] = []
        for event in events:
            if isinstance(event, Write):
                effects += self.machine.write(*event)
            else:
                given = event(self.now) if isinstance(event, type) else event
                effects += self.machine.handle(given)
            self.machine.validate()
        return effects

    def hear(self, **reply: Any) -> list[Any]:
        """Handle a reply of the proxy."""
        return self.tell(Replied(PutReply(**reply), self.now))

    def ready(self, last: int = -1, claim: Claim = CLAIM, **limits: int) -> list[Any]:
        """Handle the reply of a proxy that is ready."""
        ready = Ready(
            log="clicks",
            producer=claim,
            sequence=last,
            window_records=1000,
            window_bytes=limits.get("window_bytes", 10**6),
            message_bytes_max=limits.get("message_bytes_max", 10**6),
        )
        return self.hear(ready=ready)

    def begun(self, **limits: int) -> Harness:
        """Return this machine with an open stream."""
        self.tell(Begin)
        self.ready(-1, CLAIM, **limits)
        return self

    def write(self, *tickets: str) -> list[Any]:
        """Write records, one message each, as far as the proxy takes them."""
        effects = []
        for ticket in tickets:
            effects += self.tell(Write(0, ticket.encode(), ticket), SendDue)
            if any(isinstance(each, Send) for each in effects):
                effects += self.tell(Sent)
        return effects

    @property
    def state(self) -> ClientState:
        """The state of the machine."""
        return self.machine.state


def sequences(effects: Sequence[Any]) -> list[int | None]:
    """Return the first sequences of the messages that are sent."""
    sent = [PutMessage.parse(each.data) for each in effects if isinstance(each, Send)]
    return [sequence_of(each) for each in sent]


def acknowledged(effects: Sequence[Any]) -> list[tuple[str, DLSN | None]]:
    """Return the answers to callers."""
    return [each for effect in effects if isinstance(effect, Progress) for each in effect.answers]


def ended(effects: Sequence[Any]) -> tuple[type[Exception] | None, list[str]]:
    """Return the kind of the error with which the machine ends, and the callers that get it."""
    (end,) = (each for each in effects if isinstance(each, Ended))
    return (None if end.error is None else type(end.error)), list(end.tickets)


def test_records_are_gathered_sent_and_acknowledged() -> None:
    """The first stream is for a name; records of one turn are one message; positions follow."""
    client = Harness()
    opening, after = client.tell(Begin)
    assert opening == OpenStream("_p", byte_log_schema(), msgspec.UNSET)
    assert after == After(SILENCE_S)
    assert client.ready() == [Call.OPENED]
    assert client.tell(Write(1, b"a", "a")) == [Call.SEND_SOON]
    assert client.tell(Write(2, b"b", "b")) == []
    effects = client.tell(SendDue)
    assert sequences(effects) == [0]
    assert client.tell(Write(3, b"c", "c")) == []  # the message before is still being sent
    assert sequences(client.tell(Sent)) == [2]
    ends = [End(2, "1:0:1", 2), End(3, "1:1:0", 1)]
    assert acknowledged(client.hear(acked=3, ends=ends)) == [
        ("a", DLSN(1, 0, 0)),
        ("b", DLSN(1, 0, 1)),
        ("c", DLSN(1, 1, 0)),
    ]
    machine = client.machine
    assert (machine.last_dlsn, machine.outbox.next_sequence, machine.lost) == (DLSN(1, 1, 0), 3, 0)
    assert repr(machine) == "<Outbox 0 records, 0 messages in flight> SENDING"


def test_a_flush_is_answered_when_all_is_durable() -> None:
    """At once if there is nothing to wait for."""
    client = Harness().begun()
    assert acknowledged(client.tell(Flush("now"))) == [("now", None)]
    client.tell(WriteBatch(ROWS, "rows"))
    assert client.tell(Flush("later")) == []
    client.tell(SendDue, Sent)
    assert acknowledged(client.hear(acked=2)) == [("rows", None), ("later", None)]


def test_the_window_of_the_proxy_is_kept_to() -> None:
    """Messages beyond the window are sent after an acknowledgement; other replies do not count."""
    client = Harness().begun(window_bytes=1)
    assert sequences(client.write("a", "b")) == [0]
    assert client.hear(throttled_ms=5) == []
    assert sequences(client.hear(acked=1)) == [1]


def test_a_message_that_is_too_long_is_split() -> None:
    """Until each part fits; one record that does not fit ends the machine."""
    client = Harness().begun(message_bytes_max=1000)
    client.tell(WriteBatch(batch_of([0] * 4, [bytes(500)] * 4), "rows"))
    effects = client.tell(SendDue, Sent, Sent, Sent, Sent)
    assert sequences(effects) == [0, 1, 2, 3]
    assert acknowledged(client.hear(acked=3)) == []
    client.tell(WriteBatch(batch_of([0], [bytes(2000)]), "long"))
    assert ended(client.tell(SendDue)) == (LogRecordTooLongError, ["rows", "long"])
    assert (client.state, client.machine.lost) == (ClientState.FAILED, 2)


def test_a_stream_is_for_one_schema() -> None:
    """A batch of another one waits for the acknowledgements, and gets the next stream."""
    client = Harness().begun()
    client.write("a")
    other = pa.record_batch({"payload": ["b"]})
    client.tell(WriteBatch(other, "b"))
    assert client.tell(SendDue) == []
    progress, closing, opening, _ = client.hear(acked=1)
    assert (acknowledged([progress]), closing) == ([("a", None)], Call.CLOSE_STREAM)
    assert opening == OpenStream(CLAIM, other.schema, msgspec.UNSET)
    assert sequences(client.ready(0)) == [1]


def test_records_of_a_lost_stream_are_sent_again() -> None:
    """With the same sequences, behind what the log has by then."""
    client = Harness().begun()
    client.write("a", "b", "c")
    closing, retry = client.tell(LOST)
    assert (closing, client.state) == (Call.CLOSE_STREAM, ClientState.PAUSED)
    assert retry == Retry(LOST.error, None, 0.0)
    assert client.tell(Write(0, b"d", "d")) == []
    opening, _ = client.tell(RetryDue)
    assert opening.producer == CLAIM
    effects = client.ready(0)
    assert acknowledged(effects) == [("a", None)]
    effects += client.tell(Sent, Sent)
    assert sequences(effects) == [1, 2, 3]
    assert acknowledged(client.hear(acked=3)) == [(each, None) for each in "bcd"]
    client.tell(LOST)
    assert client.tell(RetryDue) == [Progress(())]  # earlier failures count no more
    assert client.state is ClientState.IDLE
    assert client.tell(Write(0, b"e", "e")) == [Call.SEND_SOON]
    assert isinstance(client.tell(SendDue)[0], OpenStream)
    assert client.tell(SendDue) == []


def test_the_first_stream_is_tried_again_too() -> None:
    """Though there is nothing to send."""
    client = Harness()
    client.tell(Begin, LOST)
    assert client.tell(RetryDue)[0].producer == "_p"


def test_redirections_are_followed() -> None:
    """To where the end of the stream says, or the notice before it."""
    client = Harness().begun()
    client.write("a")
    client.tell(Write(0, b"b", "b"))
    assert client.hear(draining=Draining("grpc://two:1")) == [Call.END_SENDING]
    assert client.tell(SendDue) == []  # it takes no more
    assert acknowledged(client.hear(acked=1)) == [("a", None)]
    moved = LogElsewhereError("it is elsewhere")
    _, retry = client.tell(StreamEnded(moved, True, retry_after_s=2.0))
    assert retry == Retry(moved, "grpc://two:1", 2.0)
    client.tell(RetryDue)
    _, retry = client.tell(StreamEnded(moved, True, "grpc://three:1"))
    assert retry.location == "grpc://three:1"


def test_a_silent_proxy_is_left() -> None:
    """If it does not become ready, acknowledge, or end the stream."""
    for step in range(4):
        client = Harness()
        client.tell(Begin)
        if step:
            client.ready()
            client.write("a")
        if step == 2:
            client.now = 3.0
            client.hear(draining=Draining())
        if step == 3:
            client.hear(acked=1)
            client.tell(Close)
        begun, client.now = client.now, SILENCE_S
        effects = client.tell(SilenceDue)
        if begun:
            assert effects == [After(begun)]
            client.now += begun
            effects = client.tell(SilenceDue)
        if step == 3:
            assert (client.state, effects) == (
                ClientState.CLOSED,
                [Call.CLOSE_STREAM, Ended(None)],
            )
        else:
            assert "said nothing for 15 s" in str(effects[-1].error)
            assert isinstance(effects[-1], Retry)


def test_a_proxy_that_owes_nothing_may_be_silent() -> None:
    """Its time begins with the next message."""
    client = Harness().begun()
    client.now = SILENCE_S
    assert client.tell(SilenceDue) == []
    client.now = 100.0
    assert After(SILENCE_S) in client.write("a")
    client.now += SILENCE_S - 1
    assert client.write("b")
    client.now += 1
    assert client.tell(SilenceDue)[-1].error.retriable


@pytest.mark.parametrize("acked", [0, 1])
def test_a_forgotten_writer_takes_another_name(acked: int) -> None:
    """Its records are numbered from the new base: nothing of them is in the log."""
    client = Harness().begun()
    client.write(*"ab"[:acked])
    client.hear(acked=acked)
    client.write("c", "d")
    _, retry = client.tell(FENCED)
    assert (retry.error, client.machine.identity.name) == (FENCED.error, "_p-1")
    assert client.tell(RetryDue)[0].producer == "_p-1"
    new = msgspec.structs.replace(CLAIM, name="_p-1", base=5)
    effects = client.ready(4, new) + client.tell(Sent)
    assert sequences(effects) == [5, 6]
    assert acknowledged(client.hear(acked=2)) == [("c", None), ("d", None)]


def test_a_log_that_knows_less_than_it_acknowledged_has_forgotten() -> None:
    """With nothing in doubt another name is taken; a given name ends the machine."""
    for is_named in (False, True):
        client = Harness(is_named=is_named).begun()
        client.write("a")
        client.hear(acked=1)
        client.tell(LOST, RetryDue, Write(0, b"b", "b"), SendDue)
        effects = client.ready(-1)
        assert effects[0] is Call.OPENED
        if is_named:
            assert ended(effects) == (ProducerFencedError, ["b"])
            assert str(client.machine.error) == "log 'clicks' does not know producer '_p' any more"
        else:
            assert isinstance(effects[-1], Retry)
            assert client.machine.identity.name == "_p-1"


def test_a_fence_ends_a_writer_with_a_name_or_doubts() -> None:
    """Records that an earlier stream sent may be in the log."""
    client = Harness(is_named=True).begun()
    client.write("a")
    assert ended(client.tell(FENCED)) == (ProducerFencedError, ["a"])
    client = Harness().begun()
    client.write("a")
    client.tell(LOST, RetryDue)
    assert ended(client.tell(FENCED)) == (ProducerFencedError, ["a"])
    assert client.machine.lost == 1


@pytest.mark.parametrize("is_named", [False, True])
def test_first_records_in_doubt_are_not_sent_to_a_log_that_may_have_forgotten(
    *, is_named: bool
) -> None:
    """Only the time tells whether a log that knows nothing never had them."""
    kept_s = (KEPT_MS if is_named else GENERATED_KEPT_MS) / 1000
    for late_s in (0, 1):
        client = Harness(is_named=is_named).begun()
        client.write("a")
        client.tell(LOST)
        client.now = kept_s + late_s
        client.tell(RetryDue)
        effects = client.ready(-1)
        if late_s:
            assert ended(effects) == (ProducerFencedError, ["a"])
            assert "may hold some of 1 record that it sent" in str(client.machine.error)
        else:
            assert sequences(effects) == [0]


def test_an_answer_that_no_proxy_may_give_ends_the_machine() -> None:
    """No claim, and an acknowledgement of what was not sent."""
    client = Harness()
    client.tell(Begin)
    assert ended(client.hear(acked=1)) == (UnexpectedError, [])
    assert "did not say that it is ready" in str(client.machine.error)
    client = Harness().begun()
    client.write("a")
    assert ended(client.hear(acked=2)) == (UnexpectedError, ["a"])


def test_a_record_without_room_changes_nothing() -> None:
    """Room comes with acknowledgements."""
    client = Harness(bytes_max=1000).begun()
    client.tell(WriteBatch(batch_of([0], [bytes(2000)]), "a"))
    with pytest.raises(OverCapacityError):
        client.tell(Write(0, b"", "b"))
    machine = client.machine
    assert (machine.outbox.has_room, machine.outbox.next_sequence, machine.outbox.last_txid) == (
        False,
        1,
        -1,
    )
    client.tell(SendDue, Sent)
    client.hear(acked=1)
    assert client.machine.outbox.has_room


def test_an_ended_machine_takes_no_record() -> None:
    """At once, although many records were admitted before; a failure counts as reported then."""
    client = Harness().begun()
    client.tell(Write(0, b"", "a"), SendDue, Write(0, b"", "b"))
    assert client.tell(Close) == []
    with pytest.raises(AlreadyClosedError, match="the writer of log 'clicks' is closed"):
        client.tell(Write(0, b"", "b"))
    with pytest.raises(AlreadyClosedError):
        client.tell(WriteBatch(ROWS, "b"))
    client = Harness().begun()
    client.write("a")
    client.tell(Fail(UnexpectedError("broke")))
    known = [client.machine.is_error_reported]
    with pytest.raises(WriteError, match="takes no more records: UnexpectedError: broke"):
        client.tell(Write(0, b"", "b"))
    known.append(client.machine.is_error_reported)
    assert known == [False, True]
    with pytest.raises(WriteError):
        client.tell(WriteBatch(ROWS, "b"))


def test_a_close_ends_the_stream_in_order() -> None:
    """Once all is durable; a stream that is lost then is no harm."""
    client = Harness().begun()
    client.write("a")
    assert client.tell(Close) == []
    progress, *ending = client.hear(acked=1)
    assert (acknowledged([progress]), ending) == ([("a", None)], [Call.END_SENDING])
    assert client.hear(draining=Draining()) == []
    assert client.tell(LOST) == [Call.CLOSE_STREAM, Ended(None)]
    assert client.tell(Abort(WriteCancelledError("late"))) == []
    assert client.machine.error is None


def test_a_close_without_a_stream_closes_at_once() -> None:
    """Also during a pause, whose end changes nothing then."""
    client = Harness().begun()
    client.tell(LOST)
    assert ended(client.tell(Close)) == (None, [])
    assert client.tell(RetryDue) == []
    client = Harness().begun()
    client.tell(LOST, RetryDue)
    assert ended(client.tell(Close)) == (None, [])
    for hears in (False, True):
        client = Harness()
        client.tell(Begin, Close)
        if hears:
            assert client.ready() == [Call.OPENED, Call.END_SENDING]
        assert ended(client.tell(LOST)) == (None, [])


@pytest.mark.parametrize("state", ["idle", "opening", "sending", "paused"])
def test_an_abort_refuses_all_callers(state: str) -> None:
    """The end of the patience does the same."""
    client = Harness()
    if state != "idle":
        client.tell(Begin)
    if state in ("sending", "paused"):
        client.ready()
        client.write("a")
    if state == "paused":
        client.tell(LOST)
        end: Any = Fail(LOST.error)
    else:
        end = Abort(WriteCancelledError("aborted"))
    effects = client.tell(end)
    assert ended(effects) == (type(end.error), ["a"] if state in ("sending", "paused") else [])
    assert effects[0] is Call.CLOSE_STREAM
    assert client.machine.is_closing == (state != "paused")
    assert client.tell(SendDue) == []


# Conditional appends


def conditional(expected: str | None = "1:0:0") -> Harness:
    """Return a machine with a conditional append, and its stream begun."""
    client = Harness(expected=expected)
    assert client.tell(WriteBatch(ROWS, "rows")) == [Call.SEND_SOON]
    opening, _ = client.tell(SendDue)
    assert opening == OpenStream("_p", ROWS.schema, expected)
    return client


def test_a_conditional_append_is_one_message() -> None:
    """After which the client's half ends; with the acknowledgement the machine is closed."""
    client = conditional()
    effects = client.ready()
    assert sequences(effects) == [0]
    assert effects[-1] is Call.END_SENDING
    assert client.tell(Sent) == []
    effects = client.hear(acked=2, ends=[End(2, "1:1:1", 2)])
    assert acknowledged(effects) == [("rows", DLSN(1, 1, 1))]
    assert ended(effects) == (None, [])


def test_a_conditional_append_is_repeated_for_its_position() -> None:
    """Though the log says that it has it; a log that is drained meanwhile is no reason to stop."""
    client = conditional(None)
    client.ready()
    assert client.hear(draining=Draining("grpc://two:1")) == []
    _, retry = client.tell(LOST)
    assert retry.location == "grpc://two:1"
    client.tell(RetryDue)
    effects = client.ready(1)
    assert (acknowledged(effects), sequences(effects)) == ([], [0])
    assert acknowledged(client.hear(acked=2, ends=[End(2, "1:0:1", 2)])) == [
        ("rows", DLSN(1, 0, 1))
    ]


def test_a_conditional_append_fails_as_a_whole() -> None:
    """If the condition does, or the message is too long, which is never split."""
    client = conditional()
    client.ready()
    refusal = StreamEnded(ConditionFailedError("it is elsewhere"), again=False)
    assert ended(client.tell(refusal)) == (ConditionFailedError, ["rows"])
    client = conditional()
    assert ended(client.ready(message_bytes_max=10)) == (LogRecordTooLongError, ["rows"])
    client = Harness(expected=None)
    large = batch_of([0] * 3, [bytes(10**6)] * 3)
    client.tell(WriteBatch(large, "rows"), SendDue)
    assert len(sequences(client.ready(message_bytes_max=10**7))) == 1


# Appends with a claim of the caller's own


def claimed() -> Harness:
    """Return a machine with a claim and one batch, and its stream begun."""
    client = Harness(claim=CLAIM)
    assert client.tell(WriteBatch(ROWS, "rows")) == [Call.SEND_SOON]
    assert client.machine.is_closing
    opening, _ = client.tell(SendDue)
    assert opening == OpenStream(CLAIM, ROWS.schema, msgspec.UNSET)
    return client


def test_an_append_with_a_claim_is_one_message() -> None:
    """With the acknowledgement the machine is closed; the claim is the same on each stream."""
    client = claimed()
    effects = client.ready()
    assert sequences(effects) == [0]
    assert effects[-1] is Call.END_SENDING
    _, retry = client.tell(LOST)
    assert isinstance(retry, Retry)
    opening, _ = client.tell(RetryDue)
    assert opening.producer == CLAIM
    client.ready()
    effects = client.hear(acked=2, ends=[End(2, "1:1:1", 2)])
    assert acknowledged(effects) == [("rows", DLSN(1, 1, 1))]
    assert ended(effects) == (None, [])


def test_an_append_with_a_claim_that_the_log_holds_is_sent_for_its_position() -> None:
    """All of it, or the rest of it, or none of it may be there."""
    for last in (1, 0, -1):
        client = claimed()
        effects = client.ready(last)
        assert (acknowledged(effects), sequences(effects)) == ([], [0])
        assert acknowledged(client.hear(acked=2, ends=[End(2, "1:0:1", 1)])) == [
            ("rows", DLSN(1, 0, 1))
        ]


def test_a_claim_that_is_not_the_logs_fails() -> None:
    """No other name is taken, under which the records would be written again."""
    assert ended(claimed().tell(FENCED)) == (ProducerFencedError, ["rows"])


def test_a_stream_asks_for_one_look_at_silence_at_a_time() -> None:
    """It is due when the proxy has owed a reply for too long, whenever the look is asked for."""
    stream = PutStream(byte_log_schema(), 10.0)
    assert stream.timed(12.0) == [After(SILENCE_S - 2.0)]
    assert stream.timed(13.0) == ()
    stream.is_sending = stream.is_due = True
    stream.close()
    assert (stream.is_sending, stream.is_due, stream.is_timed) == (False, False, False)


def test_a_name_that_was_generated_may_be_changed() -> None:
    """The claim is asked for anew; one that a caller made is as fixed as a name that it gave."""
    identity = Identity("_p", None, msgspec.UNSET, is_named=False)
    for _ in range(2):
        identity.claim = CLAIM
        identity.begin_anew()
        assert identity.claim is None
    assert identity.name == "_p-2"
    assert (identity.is_named, identity.is_single) == (False, False)
    claimed = Identity("p", CLAIM, msgspec.UNSET, is_named=False)
    assert (claimed.is_named, claimed.is_single) == (True, True)
    assert Identity("p", None, None, is_named=False).is_single
