"""Tickets: what clients may write, and the errors for all else."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, strategies as st

from dlcore.base.errors import ConfigurationError, InvalidLogNameError
from dlcore.base.ids import DLSN, TXID_MAX
from dlcore.base.proto import flight_pb2 as pb
from dlcore.base.records import NotLessThan, RecordField
from dlcore.flight.tickets import TICKET_BYTES_MAX, Latest, Place, Ticket, Wanted, ticket_of


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ('{"dlsn": "3:17:0"}', DLSN(3, 17, 0)),
        ('{"txid": 0}', NotLessThan(RecordField.TXID, 0)),
        ('{"sequence_id": 12}', NotLessThan(RecordField.SEQUENCE_ID, 12)),
        ('{"time": "1970-01-01T00:00:01.0001Z"}', NotLessThan(RecordField.TIMESTAMP_MS, 1001)),
        ('{"time": "1970-01-01T01:00:00+01:00"}', NotLessThan(RecordField.TIMESTAMP_MS, 0)),
        ('{"time": "1969-12-31T23:59:59.5Z"}', NotLessThan(RecordField.TIMESTAMP_MS, -500)),
        ('{"latest": true}', Latest()),
    ],
)
def test_places(place: str, wanted: Wanted) -> None:
    """A position is one of five things."""
    ticket = Ticket.decode(f'{{"log": "a/b", "start": {place}}}'.encode())
    assert ticket.start is not None
    assert ticket.start.wanted == wanted


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not a ticket"),
        (b"\xff\x00", "not a ticket"),
        (b'{"log": "\xff"}', "not a ticket"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `log`"),
        (b'{"log": ""}', "invalid log name ''"),
        (b'{"log": "a", "begin": 1}', "unknown field `begin`"),
        (b'{"log": "a", "format": 2}', "format=2: expected 1"),
        (b'{"log": "a", "start": {}}', "expected one of dlsn"),
        (b'{"log": "a", "start": {"txid": 1, "latest": true}}', "expected one of dlsn"),
        (b'{"log": "a", "start": {"dlsn": "3"}}', "expected a DLSN like 3:17:0, not '3'"),
        (b'{"log": "a", "end": {"txid": -1}}', ">= 0"),
        (b'{"log": "a", "end": {"time": "2026-01-01T00:00:00"}}', "timezone"),
        (b'{"log": "a", "columns": [1]}', "columns"),
        (b'{"log": "a", "follow": true, "end": {"txid": 1}}', "expected no end, or an end"),
        (b'{"log": "' + b"a" * TICKET_BYTES_MAX + b'"}', "expected at most 65,536"),
    ],
)
def test_bytes_that_are_no_ticket(data: bytes, problem: str) -> None:
    """The error shows it, says what is wrong, and what would be right."""
    with pytest.raises(ConfigurationError, match=problem) as caught:
        Ticket.decode(data)
    assert len(str(caught.value)) < 1000


@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    """They are a ticket, or a clear error."""
    try:
        Ticket.decode(data)
    except ConfigurationError as error:
        assert "not a ticket" in str(error)  # noqa: PT017


PLACES = st.one_of(
    st.none(),
    st.builds(Place, dlsn=st.builds(str, st.builds(DLSN, *[st.integers(0, 2**63 - 1)] * 3))),
    st.builds(Place, txid=st.integers(0, TXID_MAX)),
    st.builds(Place, sequence_id=st.integers(0, TXID_MAX)),
    st.builds(Place, time=st.datetimes(timezones=st.just(UTC))),
    st.just(Place(latest=True)),
)


@given(
    st.builds(
        Ticket,
        log=st.sampled_from(["a", "a/b", "ü"]),
        log_id=st.none() | st.from_regex(r"[0-9A-Za-z-]{1,64}", fullmatch=True),
        start=PLACES,
        end=PLACES,
        columns=st.none() | st.lists(st.text()),
    )
)
def test_an_encoded_ticket_is_decoded(ticket: Ticket) -> None:
    """Also by another process."""
    assert Ticket.decode(ticket.encode()) == ticket
    followed = msgspec.structs.replace(ticket, follow=True, end=None)
    assert Ticket.decode(followed.encode()) == followed


def test_a_ticket_is_checked_when_it_is_made() -> None:
    """Not only when it comes over the wire."""
    with pytest.raises(InvalidLogNameError, match="'//'"):
        Ticket(log="a//b")
    with pytest.raises(ConfigurationError, match="expected one of"):
        Place(dlsn="1:0:0", time=datetime.now(UTC))


def test_a_descriptor_without_a_type() -> None:
    """It is neither the path of a log nor a ticket."""
    with pytest.raises(ConfigurationError, match="without a type: expected a path"):
        ticket_of(pb.FlightDescriptor())
