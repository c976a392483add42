"""Ends of a connection: each way in which the other side can break the protocol, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    BadRequestError,
    BookieError,
    BookieStorageError,
    BookieUnavailableError,
    LedgerFencedError,
    WrongIncarnationError,
)
from dlcore.wire.fields import Status, error_of, status_of
from dlcore.wire.messages import (
    REQUEST_ID_MAX,
    Add,
    Cancel,
    Chunk,
    Durable,
    Failed,
    Header,
    Hello,
    Kind,
    Lac,
    Message,
    Ping,
    Pong,
    ReadEntries,
    ReadEntry,
    ReadLac,
    Update,
    Welcome,
    WireError,
    WriteLac,
    decode,
    encode,
)
from dlcore.wire.session import Brought
from tests.dlcore.wire.test_ends import BOOKIE, ENTRY, HELLO, feed, new_bookie, new_client

if TYPE_CHECKING:
    from dlcore.wire.session import ClientEnd

WELCOME = Welcome(1, 0, BOOKIE.name, BOOKIE.incarnation)


@pytest.mark.parametrize(
    ("hello", "error", "message"),
    [
        (HELLO._replace(version=2), BadRequestError, "protocol version 2, expected 1"),
        (HELLO._replace(cluster_id="x"), BadRequestError, "is of cluster cluster, not x"),
        (HELLO._replace(bookie_name="b2"), WrongIncarnationError, "not b2, incarnation 1"),
        (HELLO._replace(incarnation="2" * 32), WrongIncarnationError, "incarnation 222"),
    ],
)
def test_a_bookie_refuses_whom_it_cannot_serve(
    hello: Hello, error: type[BookieError], message: str
) -> None:
    """And is not open after that."""
    end = new_bookie(is_open=False)
    feed(end, encode(hello))
    with pytest.raises(error, match=message):
        end.next_event()
    assert not end.greeting.is_over


@pytest.mark.parametrize(
    ("message", "is_open", "problem"),
    [
        (Ping(1), False, "PING: expected HELLO"),
        (HELLO, True, "HELLO: expected ADD or"),
        (Lac(1, 7), True, "LAC: expected ADD or"),
    ],
)
def test_a_bookie_ends_what_breaks_the_protocol(
    message: Message, is_open: bool, problem: str
) -> None:
    """Out of turn, or not a client's to say."""
    end = new_bookie(is_open=is_open)
    feed(end, encode(message))
    with pytest.raises(WireError, match=problem):
        end.next_event()


def test_signs_of_life_pass_both_ends() -> None:
    """They are the driver's to answer; a given up read is the bookie's driver's to end."""
    for end in (new_bookie(), new_client()):
        feed(end, [*encode(Ping(4)), *encode(Pong(5))])
        assert [end.next_event(), end.next_event()] == [Ping(4), Pong(5)]
    bookie = new_bookie()
    feed(bookie, encode(Cancel(9)))
    assert bookie.next_event() == Cancel(9)


def test_only_what_a_read_is_sent_takes_of_its_window() -> None:
    """Not answers of other requests, nor a chunk behind its end."""
    bookie = new_bookie()
    feed(bookie, encode(ReadEntries(1, 7, 0, 9, 1, 500, 1000)))
    bookie.next_event()
    bookie.send(Durable([1]))
    assert bookie.window_of(1) == 1000
    bookie.end(1)
    bookie.send(Chunk(1, [ENTRY], is_last=True))
    assert bookie.window_of(1) == 0


@pytest.mark.parametrize(
    ("welcome", "error", "message"),
    [
        (WELCOME._replace(version=3), WireError, "protocol version 3 with features 0x0"),
        (WELCOME._replace(features=4), WireError, "features 0x4: expected 1 and 0x3"),
        (WELCOME._replace(bookie_name="b2"), WrongIncarnationError, "b2, incarnation 1"),
        (WELCOME._replace(incarnation="3" * 32), WrongIncarnationError, "incarnation 33"),
        (Failed(0, Status.WRONG_INCARNATION, "no"), WrongIncarnationError, "no"),
        (Failed(0, Status.BAD_REQUEST, "old"), BadRequestError, "old"),
        (
            Failed(0, Status.UNAVAILABLE, "bye"),
            BookieUnavailableError,
            "it ended the connection: bye",
        ),
        (Lac(1, 1), WireError, "LAC: expected WELCOME or FAILED"),
    ],
)
def test_a_client_enters_only_where_it_is_meant_and_understood(
    welcome: Message, error: type[BookieError], message: str
) -> None:
    """The answering bookie is checked, not only the called one."""
    end = new_client(is_open=False)
    feed(end, encode(welcome))
    with pytest.raises(error, match=message) as caught:
        end.next_event()
    assert type(caught.value) is error


def client_with_requests() -> ClientEnd[str, str]:
    """Return a client that waits for: 1 an add, 2 a LAC, 3 a read of the LAC, 4 entries."""
    end = new_client()
    end.add([ENTRY], ["add"], is_recovery=False)
    end.write_lac(7, 0, "lac")
    end.read(ReadLac(0, 7, fence=False), "read of the LAC")
    end.read(ReadEntries(0, 7, 0, 9, 1, 500, 100), "entries")
    return end


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (WELCOME, "WELCOME: expected PING or"),
        (Durable([4]), "DURABLE for read 4: expected only writes"),
        (Durable([5]), "an answer to request 5, which was never sent"),
        (Failed(5, Status.FENCED, ""), "an answer to request 5"),
        (Lac(1, 3), "Lac for the write 1"),
        (Chunk(2, [], is_last=True), "Chunk for the write 2"),
        (Update(3, [], 1, False), "Update for read 3"),
        (Lac(4, 3), "Lac for read 4"),
        (Lac(9, 3), "an answer to request 9"),
        (Add(1, False, [ENTRY]), "ADD: expected PING or"),
    ],
)
def test_a_client_believes_no_answer_that_fits_no_request(answer: Message, problem: str) -> None:
    """Requests are still open: the connection ends, and its driver fails all of it."""
    end = client_with_requests()
    feed(end, encode(answer))
    with pytest.raises(WireError, match=problem):
        end.next_event()
    assert [*end.writes.values()] == ["add", "lac"]
    assert end.reads == ["read of the LAC", "entries"]


def test_a_bookie_that_ends_an_open_connection_says_nothing_of_its_requests() -> None:
    """Also when its reason would mean something else before the handshake."""
    end = client_with_requests()
    feed(end, encode(Failed(0, Status.BAD_REQUEST, "a mistake")))
    with pytest.raises(BookieUnavailableError, match="it ended the connection: a mistake"):
        end.next_event()


def test_more_than_a_window_is_refused() -> None:
    """One message may go beyond it, not two."""
    end = client_with_requests()
    chunk = Chunk(4, [ENTRY] * 3, is_last=False)
    feed(end, [*encode(chunk), *encode(chunk)])
    assert isinstance(end.next_event(), Brought)
    with pytest.raises(WireError, match="read 4 has more bytes than its window"):
        end.next_event()


def test_the_last_chunk_ends_a_read() -> None:
    """Later answers of the bookie belong to no request."""
    end = client_with_requests()
    last = Chunk(4, [ENTRY], is_last=True)
    feed(end, encode(last))
    brought = end.next_event()
    assert isinstance(brought, Brought)
    assert brought.read == "entries"
    assert end.reads == ["read of the LAC"]
    feed(end, encode(last))
    assert end.next_event() is None


def test_given_up_requests_are_passed_over() -> None:
    """Answers cross the cancel; its window has no owner."""
    end = client_with_requests()
    end.cancel(3)
    end.cancel(4)
    assert end.take(4, 1_000) == []
    answers: list[Message] = [
        Lac(3, 5),
        Chunk(4, [ENTRY], is_last=False),
        Failed(4, Status.OVERLOADED, ""),
    ]
    feed(end, [part for answer in answers for part in encode(answer)])
    assert end.next_event() is None


def test_a_connection_ends_before_its_ids_do() -> None:
    """The driver opens another one."""
    end = new_client()
    end._next_id = REQUEST_ID_MAX - 1
    end.read(ReadEntry(0, 7, 0, fence=False), "last but one")
    with pytest.raises(BookieUnavailableError, match="used all its request ids"):
        end.add([ENTRY, ENTRY], ["one", "two"], is_recovery=False)
    assert not end.writes


def header_of(kind: Kind, fields: bytes, payload: bytes) -> Header:
    """Return a sound header."""
    return Header(kind, 0, 1, len(fields), len(payload), 0)


HELLO_FIELDS = b"".join(encode(HELLO))[24:]


@pytest.mark.parametrize(
    ("kind", "fields", "payload", "problem"),
    [
        (Kind.CHUNK, b"\0" * 6, b"", "6 bytes of entry sizes: expected a multiple of 4"),
        (Kind.CHUNK, b"\0\0\0\2", b"abc", "entries of 2 bytes in a payload of 3 bytes"),
        (Kind.ADD, b"\0\0\0\2", b"ab", "an entry of 2 bytes: expected at least"),
        (Kind.FAILED, b"\x03\xff\xfe", b"", "FAILED with wrong fields: .*utf-8"),
        (Kind.UPDATE, b"\0" * 7, b"", "UPDATE with wrong fields"),
        (Kind.HELLO, HELLO_FIELDS[:-1] + b"\x09", b"", "a text of 9 bytes where 0 are left"),
        (Kind.HELLO, HELLO_FIELDS + b"x", b"", "1 bytes too many"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    kind: Kind, fields: bytes, payload: bytes, problem: str
) -> None:
    """Behind a checksum that holds: the sender is wrong, not the wire."""
    assert isinstance(decode(header_of(Kind.HELLO, HELLO_FIELDS, b""), HELLO_FIELDS, VOID), Hello)
    with pytest.raises(WireError, match=problem):
        decode(header_of(kind, fields, payload), fields, memoryview(payload))


VOID = memoryview(b"")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (WriteLac(1, 2**63, 0), "WriteLac.*cannot be sent"),
        (HELLO._replace(token=b"t" * 70_000), "has 70000 bytes, at most"),
    ],
)
def test_values_that_fit_no_field_are_not_sent(message: Message, problem: str) -> None:
    """Refused where they come from."""
    with pytest.raises(BadRequestError, match=problem):
        encode(message)


def test_statuses_stand_for_errors_in_both_directions() -> None:
    """An error that has none, or a status of a later version, is "unknown", never a proven no."""
    for status in Status:
        error = error_of(status, "why")
        assert status_of(error) == (status, "why")
    assert status_of(AlreadyClosedError("closed")) == (Status.UNAVAILABLE, "closed")

    class MyFence(LedgerFencedError):
        pass

    assert status_of(MyFence("mine")) == (Status.FENCED, "mine")
    assert status_of(ValueError("bad")) == (Status.STORAGE_ERROR, "ValueError: bad")
    unknown = error_of(99, "why")
    assert type(unknown) is BookieStorageError
    assert str(unknown) == "unknown status 99: why"
