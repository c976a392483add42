"""Proxies as processes over real bookies, asked by Arrow's own Flight client."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import grpc
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from dlcore.base.proto import health_pb2
from dlcore.sync import open_namespace
from tests.fixtures.proxies import proxy_process

if TYPE_CHECKING:
    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration

_END_S = 60.0


def new_name() -> str:
    """Return a name that no other test has."""
    return f"proxied/{uuid4().hex}"


def test_its_actions_are_listed(proxy: ProxyProcess) -> None:
    """Each with what it takes."""
    with proxy.client() as client:
        texts = {action.type: action.description for action in client.list_actions()}
    assert "{log, [schema], [log_id], [settings]}" in texts["create"]


def test_a_log_is_created(proxy: ProxyProcess, namespace_uri: str) -> None:
    """Anybody sees it, and a second time it exists."""
    name = new_name()
    assert proxy.act("create", log=name) == {}
    with open_namespace(namespace_uri) as namespace:
        assert namespace.log_exists(name)
    with pytest.raises(pa.ArrowException, match=f"LogExistsError: log '{name}' exists"):
        proxy.act("create", log=name)


@pytest.mark.parametrize(
    ("action", "body", "problem"),
    [
        ("create", {}, "missing required field `log`"),
        ("create", {"log": 5}, "Expected `str`, got `int`"),
        ("create", {"log": "a", "speed": 1}, "unknown field `speed`"),
        ("create", {"log": "a//b"}, "InvalidLogNameError: invalid log name 'a//b'"),
        ("owner", {"log": ""}, "it is empty"),
    ],
)
def test_a_wrong_action_is_refused(
    proxy: ProxyProcess, action: str, body: dict[str, object], problem: str
) -> None:
    """The status is INVALID_ARGUMENT, and says what is wrong."""
    with pytest.raises(pa.ArrowInvalid, match=problem):
        proxy.act(action, **body)


def test_an_unknown_action_is_not_implemented(proxy: ProxyProcess) -> None:
    """A client of a later release can tell it from a body that is wrong."""
    with pytest.raises(NotImplementedError, match="expected one of create"):
        proxy.act("fly")


def test_a_body_that_is_no_json_is_refused(proxy: ProxyProcess) -> None:
    """Random bytes are no request."""
    with proxy.client() as client, pytest.raises(pa.ArrowInvalid, match="malformed"):
        list(client.do_action(flight.Action("create", b"\x80\x04")))


def test_the_standard_health_service_answers(proxy: ProxyProcess) -> None:
    """For the whole, for Flight, and for no other."""
    with grpc.insecure_channel(proxy.location.removeprefix("grpc://")) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        for service in ("", "arrow.flight.protocol.FlightService"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert check(request).status == health_pb2.HealthCheckResponse.SERVING
            call = watch(request)
            assert next(call).status == health_pb2.HealthCheckResponse.SERVING
            call.cancel()
        unknown = health_pb2.HealthCheckRequest(service="other")
        call = watch(unknown)
        assert next(call).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        call.cancel()
        with pytest.raises(grpc.RpcError) as refused:
            check(unknown)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_clients_that_watch_its_health_learn_of_its_end(sandbox: Sandbox) -> None:
    """It says so before it ends what it serves."""
    with proxy_process(sandbox.uri) as stopped:
        with grpc.insecure_channel(stopped.location.removeprefix("grpc://")) as channel:
            call = channel.unary_stream(
                "/grpc.health.v1.Health/Watch",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )(health_pb2.HealthCheckRequest())
            assert next(call).status == health_pb2.HealthCheckResponse.SERVING
            stopped.process.terminate()
            assert next(call).status == health_pb2.HealthCheckResponse.NOT_SERVING
        # Not `stop`: a second signal may meet a process that has stopped listening to it.
        assert stopped.process.wait(_END_S) == 0


def test_a_taken_port_is_refused(proxy: ProxyProcess, sandbox: Sandbox) -> None:
    """Two processes on one port would share its clients."""
    port = proxy.location.rpartition(":")[2]
    with (
        pytest.raises(AssertionError, match="did not start"),
        proxy_process(sandbox.uri, "--port", port),
    ):
        pass
