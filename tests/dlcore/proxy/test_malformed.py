"""Requests that make no sense, at every entrance of a proxy: each error says what is wrong."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from dlcore.base.proto import flight_pb2 as pb, health_pb2
from dlcore.proxy.service import FLIGHT
from tests.fixtures.served_proxies import Client, Proxies, proxies, with_proxies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NO_PROTOBUF = b"\xff\xff\xff"
NO_TEXT = b"\x0a\x02\xff\xfe"
"""A message whose first field is text, and holds what is none."""
UNARY = {
    f"/{FLIGHT}/DoAction": "unary_stream",
    f"/{FLIGHT}/DoGet": "unary_stream",
    f"/{FLIGHT}/GetFlightInfo": "unary_unary",
    f"/{FLIGHT}/GetSchema": "unary_unary",
    f"/{FLIGHT}/ListFlights": "unary_stream",
    f"/{FLIGHT}/ListActions": "unary_stream",
    "/grpc.health.v1.Health/Check": "unary_unary",
    "/grpc.health.v1.Health/Watch": "unary_stream",
}
CODES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "OUT_OF_RANGE", "ALREADY_EXISTS"}
"""With which a call ends that makes no sense, or happens to make some."""
CODES |= {"FAILED_PRECONDITION"}


async def ask(client: Client, method: str, data: bytes) -> tuple[str, str]:
    """Return how a call with this request ends: its status, and the message."""
    call: Any = getattr(client.channel, UNARY[method])(method)(data)
    try:
        if UNARY[method] == "unary_unary":
            await call
        elif method.endswith("Watch"):
            await call.read()
            call.cancel()
            return "OK", ""
        else:
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


async def put(client: Client, *messages: bytes) -> tuple[str, str]:
    """Return how a DoPut of these messages ends."""
    call: Any = client.channel.stream_stream(f"/{FLIGHT}/DoPut")()
    try:
        for message in messages:
            await call.write(message)
        await call.done_writing()
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    return (await call.code()).name, await call.details() or ""


@pytest.mark.parametrize("method", UNARY)
def test_bytes_that_are_no_protobuf_are_refused(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a status that says so, and without a traceback in the log of the proxy."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        code, details = await ask(client, method, NO_PROTOBUF)
        assert code == "INVALID_ARGUMENT", details
        assert "ConfigurationError: a message is no " in details
        if method.split("/")[-1] in ("DoAction", "Check", "Watch"):
            assert (await ask(client, method, NO_TEXT))[0] == "INVALID_ARGUMENT"

    with_proxies("clicks")(scenario)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 1.5, 1e308])
    | st.sampled_from(["", "clicks", "1:0:0", "a\0b", "0001-01-01T00:00:00+14:00"])
    | st.sampled_from(["9999-12-31T23:59:59.999999-14:00", "1:0:99999999999999999999", "é"])
    | st.text(max_size=5)
    | st.just("x").map(lambda letter: letter * 5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
KEYS = [
    *("log", "log_id", "start", "end", "follow", "columns", "format", "dlsn", "txid", "time"),
    *("sequence_id", "latest", "at", "logs", "known", "searches", "subscriber", "token", "mark"),
    *("producer", "expected", "positions", "unreachable", "staging", "shared", "round", "schema"),
    *("settings", "changes", "timestamp_ms", "new_name", "flush", "identity", "version"),
    *("extents", "packed", "run", "strict", "after", "lock_timeout_s", "replaces"),
]
OBJECTS = st.builds(
    lambda log, more: ({"log": "clicks"} if log else {}) | more,
    st.booleans(),
    st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=4),
).map(lambda value: json.dumps(value).encode())
HOSTILE = {
    "deep list": b"[" * 10_000,
    "deep object": b'{"log":' * 2_000,
    "half a surrogate": b'{"log": "\\ud800"}',
    "too large": b"1e999",
}


def hostile(name: str) -> bytes:
    """Return what has this name: Hypothesis tells a strategy with its values, and warns if long."""
    return HOSTILE[name]


BODIES = st.binary(max_size=60) | OBJECTS | st.sampled_from(list(HOSTILE)).map(hostile)
ACTIONS = [
    *("create", "merge_schema", "commit_append", "abort_append", "rename", "settings", "truncate"),
    *("stream_end", "owner", "logs", "release", "producer_init", "positions", "subscriptions"),
    *("move_subscription", "delete_subscription", "health", "proxies", "snapshots", "schemas"),
    *("places", "fork", "", "é"),
]
DESCRIPTORS = st.builds(
    pb.FlightDescriptor,
    type=st.sampled_from([0, 1, 2, 7]),
    cmd=BODIES,
    path=st.lists(st.sampled_from(["clicks", "", "a//b", "x" * 300, "\0"]), max_size=2),
)
REQUESTS: dict[str, st.SearchStrategy[bytes]] = {
    "DoAction": st.builds(pb.Action, type=st.sampled_from(ACTIONS), body=BODIES).map(
        pb.Action.SerializeToString
    ),
    "DoGet": st.builds(pb.Ticket, ticket=BODIES).map(pb.Ticket.SerializeToString),
    "GetFlightInfo": DESCRIPTORS.map(pb.FlightDescriptor.SerializeToString),
    "GetSchema": DESCRIPTORS.map(pb.FlightDescriptor.SerializeToString),
    "ListFlights": st.builds(pb.Criteria, expression=BODIES).map(pb.Criteria.SerializeToString),
}
CALLS = st.one_of(
    *(
        st.tuples(st.just(f"/{FLIGHT}/{name}"), request | st.binary(max_size=40))
        for name, request in REQUESTS.items()
    ),
    st.tuples(st.sampled_from(sorted(UNARY)), st.binary(max_size=40)),
)
MESSAGES = st.lists(
    st.binary(max_size=60)
    | st.builds(
        pb.FlightData,
        flight_descriptor=DESCRIPTORS,
        data_header=st.binary(max_size=40),
        app_metadata=BODIES,
        data_body=st.binary(max_size=20),
    ).map(pb.FlightData.SerializeToString),
    max_size=3,
)


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Any], Any]]:
    """Run what asks one proxy, which serves for all of this module."""
    with asyncio.Runner() as runner:
        served = proxies("clicks")

        async def begin() -> Client:
            return await (await served.__aenter__()).start(lock_timeout_s=0.05)

        client = runner.run(begin())
        yield lambda body: runner.run(asyncio.wait_for(body(client), 20))
        runner.run(served.__aexit__(None, None, None))


def judge(end: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """Require a status that says what is wrong, and a log without a traceback."""
    assert end[0] in CODES, end
    logged = [each for each in caplog.records if each.levelno >= logging.ERROR or each.exc_info]
    assert not logged, [each.getMessage() for each in logged]


FUZZ = settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(call=CALLS)
def test_any_bytes_get_a_status_that_says_why(
    run: Callable[[Any], Any], caplog: pytest.LogCaptureFixture, call: tuple[str, bytes]
) -> None:
    """Each method but DoPut, with random bytes, and with what nearly makes sense."""
    method, data = call
    if b'"follow": true' in data:
        return  # which waits for records
    judge(run(lambda client: ask(client, method, data)), caplog)


@FUZZ
@given(messages=MESSAGES)
def test_any_stream_gets_a_status_that_says_why(
    run: Callable[[Any], Any], caplog: pytest.LogCaptureFixture, messages: list[bytes]
) -> None:
    """The same for DoPut, message by message."""
    judge(run(lambda client: put(client, *messages)), caplog)


def test_the_health_service_is_asked_for_what_it_knows() -> None:
    """A message of its own that makes sense is answered."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        request = health_pb2.HealthCheckRequest(service=FLIGHT).SerializeToString()
        assert await ask(client, "/grpc.health.v1.Health/Check", request) == ("OK", "")

    with_proxies()(scenario)
