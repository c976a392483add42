"""Every entrance of a proxy, tried by callers with each right: the table has no row without a case.

Method: proxies over a cluster in memory.  The users read, append and so on have exactly that right
on the whole namespace; the rights of `SUFFICES` are written here by hand, and not taken from the
code.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
import pyarrow as pa
import pytest

from dlcore.backends.direct.namespace import DirectNamespace
from dlcore.base.access.audit import verify
from dlcore.base.access.rights import Right
from dlcore.base.errors import ConfigurationError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.entrances import ENTRANCES
from dlcore.log.metadata.segment import StagedExtent
from dlcore.proxy.service import FLIGHT
from tests.fixtures.served_proxies import PAYLOADS, Client, Proxies, Stream, data_of, with_proxies
from tests.fixtures.tokens import Issuer

if TYPE_CHECKING:
    from pathlib import Path

RIGHTS = [right.value for right in Right]
EVERY, ALL = set(RIGHTS), {*RIGHTS, "nothing", "root"}
DESCRIBE = EVERY  # each right includes it
STAGED = msgspec.to_builtins(
    StagedExtent(
        log="a", log_id="x", identity="i", ledger_id=1, first_entry_id=0, last_entry_id=0,
        record_count=1, size_bytes=1,
    )
)  # fmt: skip

SUFFICES: dict[str, tuple[set[str], dict[str, Any]]] = {
    "Handshake": (ALL, {}),
    "DoGet": ({"read"}, {"log": "a"}),
    "GetFlightInfo": (DESCRIBE, {"log": "a"}),
    "GetSchema": (DESCRIBE, {"log": "a"}),
    "ListFlights": (ALL, {}),
    "DoPut": ({"append"}, {"log": "a"}),
    "DoAction": (ALL, {}),
    "ListActions": (ALL, {}),
    "DoAction/create": ({"manage"}, {"log": "new"}),
    "DoAction/merge_schema": ({"manage"}, {"log": "a", "schema": ""}),
    "DoAction/rename": ({"manage"}, {"log": "old", "new_name": "renamed"}),
    # It needs two rights: to read the one log, and to manage the other.
    "DoAction/fork": (set(), {"log": "a", "new_name": "forked", "new_log_id": "x"}),
    "DoAction/seal": ({"manage"}, {"log": "sealed"}),
    "DoAction/delete": ({"manage"}, {"log": "gone"}),
    "DoAction/settings": (DESCRIBE, {"log": "a"}),
    "DoAction/truncate": ({"truncate"}, {"log": "a", "dlsn": "0:0:0"}),
    "DoAction/stream_end": (DESCRIBE, {"log": "a"}),
    "DoAction/owner": (DESCRIBE, {"log": "a"}),
    "DoAction/logs": (DESCRIBE, {}),
    "DoAction/release": ({"manage"}, {"log": "a"}),
    "DoAction/drain": ({"manage"}, {}),
    "DoAction/undrain": ({"manage"}, {}),
    "DoAction/health": (ALL, {}),
    "DoAction/proxies": (ALL, {}),
    "DoAction/access_rules": ({"manage"}, {}),
    "DoAction/producer_init": ({"append"}, {"log": "a", "producer": "p"}),
    "DoAction/commit_append": (
        {"append"}, {"identity": "i", "version": 0, "token": "t", "extents": [STAGED]},
    ),
    "DoAction/abort_append": (
        {"append"}, {"identity": "i", "version": 0, "token": "t", "extents": [STAGED]},
    ),
    "DoAction/positions": (DESCRIBE, {"log": "a"}),
    "DoAction/subscriptions": (DESCRIBE, {"log": "a"}),
    "DoAction/move_subscription": (
        {"read"}, {"log": "a", "subscriber": "s", "dlsn": "0:0:0", "token": "t"},
    ),
    "DoAction/delete_subscription": (
        {"read"}, {"log": "a", "subscriber": "s", "mark": {"version": 0, "token": "t"}},
    ),
    "DoAction/snapshots": (DESCRIBE, {"logs": ["a"]}),
    "DoAction/schemas": (DESCRIBE, {"logs": ["a"]}),
    "DoAction/places": (
        DESCRIBE, {"searches": [{"log": "a", "log_id": "x", "end": "9:0:0", "at": {"txid": 1}}]},
    ),
}  # fmt: skip
"""For each entrance: who may enter (the names of rights, root and nothing), and a request."""
WITH_MORE: list[tuple[str, set[str], dict[str, Any]]] = [
    ("DoAction/settings", {"manage"}, {"log": "a", "changes": {"entry_bytes": 4096}}),
    ("DoAction/stream_end", {"append"}, {"log": "a", "flush": True}),
    ("DoAction/commit_append", {"append"}, {
        "identity": "i", "version": 0, "token": "t", "extents": [[*STAGED[:-3], "b", "x", "i"]],
    }),
    ("DoAction/commit_append", {"truncate"}, {
        "identity": "i", "version": 0, "token": "t", "replaces": ["a"],
    }),
    ("DoPut", {"append"}, {"staging": "i", "log": "a"}),
]  # fmt: skip
"""Requests whose contents need another right."""


@pytest.fixture
def issuer() -> Issuer:
    """The signer of the tokens of all users."""
    return Issuer()


@pytest.fixture
def settings(tmp_path: Path, issuer: Issuer) -> dict[str, Any]:
    """The settings of a proxy with users, a super user and an audit log."""
    return {
        **issuer.trusted_in(tmp_path),
        "super_users": "user:root, certificate:ops",
        "audit_file": str(tmp_path / "audit.jsonl"),
    }


class User:
    """A user of a proxy, which tells how its calls end."""

    def __init__(self, client: Client, token: str) -> None:
        self.client = client
        self.metadata = (("authorization", f"Bearer {token}"),)

    def _call(self, kind: str, method: str, message: Any = None) -> Any:
        call: Any = getattr(self.client.channel, kind)(f"/{FLIGHT}/{method}")
        data = () if message is None else (message.SerializeToString(),)
        return call(*data, metadata=self.metadata)

    async def status_of(self, entrance: str, body: dict[str, Any]) -> str:
        """Return the name of the status of a call."""
        method, _, action = entrance.partition("/")
        data = json.dumps(body).encode()
        descriptor = pb.FlightDescriptor(type=pb.FlightDescriptor.CMD, cmd=data)
        match method:
            case "DoAction":
                message = pb.Action(type=action or "health", body=data)
                call = self._call("unary_stream", method, message)
            case "DoGet":
                call = self._call("unary_stream", method, pb.Ticket(ticket=data))
            case "GetFlightInfo" | "GetSchema":
                call = self._call("unary_unary", method, descriptor)
            case "ListFlights":
                call = self._call("unary_stream", method, pb.Criteria())
            case "ListActions":
                call = self._call("unary_stream", method, pb.Empty())
            case "Handshake":
                call = self._call("stream_stream", method)
                await call.done_writing()
            case "DoPut":
                call = await self._put(body)
        if method not in ("GetFlightInfo", "GetSchema"):
            with suppress(grpc.aio.AioRpcError):
                _ = [each async for each in call]  # the status comes after all messages
        return str((await call.code()).name)

    async def _put(self, body: dict[str, Any]) -> Any:
        call = self._call("stream_stream", "DoPut")
        first = data_of(PAYLOADS.serialize())
        target = {"staging": body["staging"]} if "staging" in body else body
        first.flight_descriptor.type = pb.FlightDescriptor.CMD
        first.flight_descriptor.cmd = json.dumps(target).encode()
        await call.write(first.SerializeToString())
        if "staging" in body:
            batch = pa.record_batch([pa.array([b"x"], pa.binary())], schema=PAYLOADS)
            data = data_of(batch.serialize())
            data.app_metadata = json.dumps({"log": body["log"]}).encode()
            await call.write(data.SerializeToString())
        await call.done_writing()
        return call


def test_the_cases_are_those_of_the_table() -> None:
    """A new entrance needs a case here before it is merged."""
    assert SUFFICES.keys() == {each.name for each in ENTRANCES}


def test_each_entrance_lets_in_those_with_its_right(
    settings: dict[str, Any], issuer: Issuer, tmp_path: Path
) -> None:
    """And no one else: the others get PERMISSION_DENIED, whatever the state of the log is."""
    cases = [(name, may, body) for name, (may, body) in SUFFICES.items()] + WITH_MORE

    async def scenario(served: Proxies) -> None:
        direct = await served.cluster.open("operator")
        await direct.change_access_rules(
            add=[f"allow user:{right} {right} namespace" for right in RIGHTS]
        )
        client = await served.start(**settings)
        wrong = []
        for name, may, body in cases:
            for who in (*RIGHTS, "nothing", "root"):
                status = await User(client, issuer.token(who)).status_of(name, body)
                expected = who in may or who == "root"
                if (status != "PERMISSION_DENIED") != expected:
                    wrong.append((name, who, status))
                assert status != "UNKNOWN", (name, who)
        assert not wrong

    with_proxies("a", "old", "sealed", "gone")(scenario)
    lines = (tmp_path / "audit.jsonl").read_bytes().splitlines(keepends=True)
    count, _ = verify(lines)
    assert count > 40
    reply = [json.loads(line) for line in lines]
    for each in (
        {"principal": "user:read", "entrance": "DoAction/delete", "resource": "manage log 'gone'"},
        {"principal": "user:manage", "entrance": "DoAction/delete", "result": "ok"},
        {"principal": "user:truncate", "entrance": "DoAction/truncate", "result": "ok"},
        {"principal": "user:nothing", "entrance": "DoPut", "address": "127.0.0.1"},
    ):
        assert any(each.items() <= line.items() for line in reply), each
    assert not any(each["principal"] == "user:append" and each["result"] == "ok" for each in reply)


def test_rights_on_one_log_reach_no_other_by_its_id(
    settings: dict[str, Any], issuer: Issuer
) -> None:
    """A request may name a log of its caller, and have the id of another."""

    async def scenario(served: Proxies) -> None:
        direct = await served.cluster.open("operator")
        client = await served.start(**settings)
        mallory = User(client, issuer.token("mallory"))
        secret = (await direct.open_log("was")).log_id
        await direct.rename_log("was", "secret")
        await direct.change_access_rules(add=[f"allow user:mallory {','.join(RIGHTS)} prefix open"])
        for name, body in (
            ("DoGet", {}), ("GetFlightInfo", {}), ("DoPut", {}), ("DoAction/truncate", {"txid": 1}),
            ("DoAction/settings", {}), ("DoAction/delete", {}), ("DoAction/seal", {}),
        ):  # fmt: skip
            await until_status(mallory, name, {"log": "open", "log_id": secret, **body})
            own = await mallory.status_of(name, {"log": "open", **body})
            assert own != "PERMISSION_DENIED", name
        assert await direct.log_exists("secret")
        await direct.rename_log("secret", "open/now")
        info = await mallory.status_of("GetFlightInfo", {"log": "open", "log_id": secret})
        assert info == "OK"

    with_proxies("open", "was")(scenario)


async def until_status(user: User, name: str, body: dict[str, Any]) -> None:
    """Wait until a call is denied: a proxy follows the rules within moments."""
    for _ in range(200):
        if await user.status_of(name, body) == "PERMISSION_DENIED":
            return
    raise AssertionError(f"{name} is not denied")


def test_only_logs_with_the_right_to_describe_are_listed(
    settings: dict[str, Any], issuer: Issuer
) -> None:
    """The others are left out without a word."""

    async def scenario(served: Proxies) -> None:
        direct = await served.cluster.open("operator")
        await direct.change_access_rules(add=["allow user:alice append prefix pay/"])
        client = await served.start(**settings)
        call = User(client, issuer.token())._call("unary_stream", "ListFlights", pb.Criteria())
        infos = [pb.FlightInfo.FromString(each) async for each in call]
        assert sorted(each.flight_descriptor.path[0] for each in infos) == ["pay/a", "pay/b"]

    with_proxies("pay/a", "pay/b", "secret")(scenario)


def test_streams_that_lose_their_right_are_ended(settings: dict[str, Any], issuer: Issuer) -> None:
    """A writer gets its acknowledgements first; a stream of another user goes on."""

    async def scenario(served: Proxies) -> None:
        direct = await served.cluster.open("operator")
        rules = [f"allow user:{user} read,append log a" for user in ("alice", "bob")]
        await direct.change_access_rules(add=rules)
        client = await served.start(**settings)
        streams = {}
        for name in ("alice", "bob"):
            user = User(client, issuer.token(name))
            stream = Stream(put(user))
            await stream.begin("a")
            assert "ready" in (await stream.next_reply() or {})
            await stream.send(b"one")
            await stream.acked(1)
            ticket = pb.Ticket(ticket=b'{"log":"a","follow":true}')
            streams[name] = (stream, user._call("unary_stream", "DoGet", ticket))
        await direct.change_access_rules(remove=rules[:1])
        put_stream, get_stream = streams["alice"]
        while await put_stream.next_reply() is not None:
            pass
        code, text, _ = await put_stream.status()
        assert code == "PERMISSION_DENIED"
        assert "user:alice may not append log 'a': no rule allows it" in text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [each async for each in get_stream]
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        put_stream, get_stream = streams["bob"]
        await put_stream.send(b"two")
        await put_stream.acked(2)
        get_stream.cancel()
        assert await put_stream.last_reply() is None

    with_proxies("a")(scenario)


def put(user: User) -> Any:
    """Open a stream of a user."""
    method: Any = user.client.channel.stream_stream(
        f"/{FLIGHT}/DoPut",
        request_serializer=pb.FlightData.SerializeToString,
        response_deserializer=pb.PutResult.FromString,
    )
    return method(metadata=user.metadata)


def test_the_first_rule_of_a_namespace_is_felt_by_open_streams(
    settings: dict[str, Any], issuer: Issuer
) -> None:
    """Those that named a log by its id were not looked up, and are asked to come again."""

    async def scenario(served: Proxies) -> None:
        direct = await served.cluster.open("operator")
        log_id = (await direct.open_log("a")).log_id
        client = await served.start(**settings)
        user = User(client, issuer.token())
        calls = [
            user._call("unary_stream", "DoGet", pb.Ticket(ticket=json.dumps(ticket).encode()))
            for ticket in (
                {"log": "a", "follow": True, "log_id": log_id},
                {"log": "a", "follow": True},
            )
        ]
        for call in calls:
            await call.read()
        await direct.change_access_rules(add=["allow user:alice read log a"])
        assert await calls[0].code() is grpc.StatusCode.UNAVAILABLE
        assert not calls[1].done()
        calls[1].cancel()

    with_proxies("a")(scenario)


def test_a_call_that_ends_without_an_answer_is_in_the_audit_log(
    settings: dict[str, Any],
    issuer: Issuer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have taken effect, although its client is gone or a defect ended it."""

    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    async def scenario(served: Proxies) -> None:
        client = await served.start(**settings)
        with monkeypatch.context() as patched:
            patched.setattr(DirectNamespace, "_create_log", fail)
            status = await User(client, issuer.token()).status_of("DoAction/create", {"log": "x"})
        assert status == "UNKNOWN"

    with_proxies()(scenario)
    (line,) = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["result"] == "RuntimeError: a defect"


@pytest.mark.parametrize("names", ["alice", "user:", "user:a,group:b"])
def test_a_super_user_is_a_principal(names: str) -> None:
    """A name without its proof would match no one, which its author would learn too late."""

    async def scenario(served: Proxies) -> None:
        with pytest.raises(ConfigurationError, match="expected user:NAME"):
            await served.start(super_users=names)

    with_proxies()(scenario)
