"""Requests are read within bounds, and what the library writes is read as it was."""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings, strategies as st
from kio.index import load_payload_module
from kio.schema.errors import ErrorCode
from kio.schema.request_header.v2.header import RequestHeader
from kio.serial import entity_writer
from kio.static.constants import EntityType

from dlcore.base.errors import ConfigurationError
from dlcore.proxy.kafka import messages
from dlcore.proxy.kafka.batches import Batch, Batches
from dlcore.proxy.kafka.messages import (
    CALLS,
    Request,
    Response,
    UnknownVersion,
    request_of,
    versions_response,
)
from dlcore.proxy.kafka.parsing import Unread
from dlcore.proxy.kafka.writing import Collected

VERSIONS = [
    (call, version) for call, (low, high) in CALLS.items() for version in range(low, high + 1)
]
HOSTILE = st.binary(max_size=80) | st.lists(
    st.sampled_from([0, 1, 2, 127, 128, 255]), max_size=80
).map(bytes)


def sample(call: int, version: int) -> Any:
    """Return the class of a request."""
    return messages._payload(call, version)


def answer(call: int, version: int) -> Any:
    """Return the class of an answer."""
    module = load_payload_module(call, version, EntityType.response)
    return vars(module)[messages._payload_name(module, "Response")]


def frame_of(body: Any, *, client: str | None = "test", number: int = 7) -> bytes:
    """Return a request as the library writes it."""
    header = type(body).__header_schema__(
        request_api_key=type(body).__api_key__,
        request_api_version=type(body).__version__,
        correlation_id=number,
        client_id=client,
    )
    return written(header) + written(body)


def written(value: Any) -> bytes:
    """Return what the library writes."""
    buffer = io.BytesIO()
    entity_writer(type(value))(buffer, value)
    return buffer.getvalue()


def filled(kind: type[Any], *, has_tags: bool = True) -> Any:
    """Return a value of a class of the library, with something in each field."""
    from typing import get_args, get_type_hints

    values: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        if name.startswith("__"):
            continue
        (field,) = (each for each in fields(kind) if each.name == name)
        if "tag" in field.metadata and not has_tags:
            continue
        choices = [each for each in get_args(hint) if each is not type(None)]
        inner = choices[0] if type(None) in get_args(hint) else hint
        is_array = getattr(inner, "__origin__", None) is tuple
        part = get_args(inner)[0] if is_array else inner
        value: Any
        if hasattr(part, "__version__"):
            value = filled(part, has_tags=has_tags)
        else:
            value = {
                "string": "text", "bytes": b"bytes", "records": bytes(20_000), "bool": True,
                "error_code": ErrorCode.unknown_topic_or_partition,
                "uuid": UUID(int=5), "timedelta_i32": timedelta(milliseconds=12),
                "timedelta_i64": timedelta(milliseconds=13),
                "datetime_i64": datetime.fromtimestamp(1_700_000_000.123, UTC),
            }.get(field.metadata["kafka_type"], 3)  # fmt: skip
        values[name] = (value, value) if is_array else value
    return kind(**values)


def with_nulls(body: Any) -> Any:
    """Return a value of a class of the library with null where it may be."""
    nulls = {
        each.name: None
        for each in fields(body)
        if each.default is MISSING and "None" in str(each.type)
    }
    return replace(body, **nulls)


@pytest.mark.parametrize(("call", "version"), VERSIONS)
def test_every_answer_is_written_as_the_library_writes_it(call: int, version: int) -> None:
    """In each version that is served, byte for byte, behind its number and its size."""
    body = filled(answer(call, version), has_tags=False)
    header = type(body).__header_schema__(correlation_id=7)
    for each in (body, with_nulls(body)):
        expected = written(header) + written(each)
        found = b"".join(Response(call, version).framed(7, each))
        assert found == len(expected).to_bytes(4) + expected


@pytest.mark.parametrize(("call", "version"), VERSIONS)
def test_every_request_is_read_as_it_was_written(call: int, version: int) -> None:
    """In each version that is served, also with bytes behind it, as librdkafka has them."""
    body = filled(sample(call, version))
    expected = Request(call, version, 7, "test", body)
    assert request_of(frame_of(body)) == expected
    assert request_of(frame_of(body) + bytes(3)) == expected
    body = with_nulls(body)
    found = request_of(frame_of(body, client=None))
    assert isinstance(found, Request)
    assert (found.client, found.body) == (None, body)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(VERSIONS), HOSTILE)
def test_whatever_comes_is_a_request_or_refused(which: tuple[int, int], rest: bytes) -> None:
    """Nothing else is raised, and no memory is taken for what a length promises."""
    call, version = which
    with suppress(ConfigurationError):
        request_of(call.to_bytes(2) + version.to_bytes(2) + b"\0\0\0\1\0\1x" + rest)


@pytest.mark.parametrize("count", [2**31 - 1, 10_000_000, 4])
def test_an_array_has_no_more_elements_than_bytes(count: int) -> None:
    """The library's own reader would take memory for all of them, and end the process."""
    frame = (3).to_bytes(2) + (1).to_bytes(2) + bytes(4) + b"\0\1x" + count.to_bytes(4) + b"\0\1a"
    with pytest.raises(ConfigurationError, match=rf"an array of {count:,}: expected 0 to 3"):
        request_of(frame)


def test_tags_of_later_clients_are_passed_over() -> None:
    """They may come in any version of a call with tags."""
    frame = frame_of(filled(sample(messages.METADATA, 12)))
    assert frame.endswith(b"\0")
    found = request_of(frame[:-1] + b"\1\x63\2zz")
    assert found == request_of(frame)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "a request of 0 bytes: expected at least 8"),
        ((19).to_bytes(2) + bytes(6), r"call 19 version 0: expected one of 0 \(3 to 9\), 1 \(4"),
        ((1).to_bytes(2) + (13).to_bytes(2) + bytes(4), "call 1 version 13: expected one of"),
        ((18).to_bytes(2) + bytes(6) + b"\0\1\xff", "expected UTF-8"),
        ((3).to_bytes(2) + bytes(6) + b"\xff\xff" + b"\xff" * 4, "an array is null"),
        ((17).to_bytes(2) + bytes(6) + b"\xff\xff" + b"\xff" * 2, "a value is null"),
        ((8).to_bytes(2) + b"\0\2" + bytes(4) + b"\xff\xff\0\1g\0\0\0\0\0\0\x7f" + bytes(7), "ms:"),
    ],
)
def test_bytes_that_are_no_request_are_refused(frame: bytes, reason: str) -> None:
    """The reason names the call, and what is served."""
    with pytest.raises(ConfigurationError, match=reason):
        request_of(frame)


def test_a_varint_ends() -> None:
    """One that goes on is no number."""
    assert Unread(b"\xff\xff\xff\xff\x0f").varint() == 2**32 - 1
    with pytest.raises(ConfigurationError, match="a varint of more than 5 bytes"):
        Unread(b"\xff" * 6).varint()


def test_versions_are_answered_in_any_version() -> None:
    """To a client of a later version with the error that makes it try an earlier one."""
    frame = (18).to_bytes(2) + (99).to_bytes(2) + (5).to_bytes(4)
    assert request_of(frame) == UnknownVersion(5)
    found = b"".join(versions_response(5, 0, is_known=False))
    assert found[4:10] == (5).to_bytes(4) + (35).to_bytes(2)
    assert found[10:14] == len(CALLS).to_bytes(4)
    for version in range(5):
        assert b"".join(versions_response(5, version))[4:10] == (5).to_bytes(4) + bytes(2)


def test_batches_are_not_copied() -> None:
    """Records stand in an answer as they were given."""
    collected = Collected()
    large = bytes(1000)
    collected.small += b"ab"
    collected.take(Batches([Batch((b"c", large), 1001, 1)]))
    collected.small += b"d"
    size, *parts = collected.framed()
    assert parts == [b"ab", b"c", large, b"d"]
    assert parts[2] is large
    assert int.from_bytes(size) == 1004


def test_values_of_later_versions_are_left_out() -> None:
    """One caller makes the answers of all versions."""
    for version in (4, 12):
        part = Response(messages.FETCH, version).of(
            "PartitionData", partition_index=0, error_code=0, high_watermark=1,
            log_start_offset=5, aborted_transactions=None, records=b"",
        )  # fmt: skip
        assert hasattr(part, "log_start_offset") == (version == 12)
    assert RequestHeader.__flexible__
