"""Users of a proxy: their tokens, how long their streams last, and callers without a proof.

Method: proxies over a cluster in memory, with the keys of an issuer in a file.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.proxy.config import ProxyConfig
from dlcore.proxy.service import FLIGHT
from tests.dlcore.proxy.test_forwarding import LOGS, two
from tests.fixtures.served_proxies import PAYLOADS, Proxies, Stream, data_of, with_proxies
from tests.fixtures.tokens import AUDIENCE, ISSUER, Issuer, forged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fixtures.served_proxies import Client

Headers = tuple[tuple[str, str | bytes], ...]


@pytest.fixture
def issuer(caplog: pytest.LogCaptureFixture) -> Iterator[Issuer]:
    """The signer; no token that it signed is in a log line of any level."""
    caplog.set_level(logging.DEBUG)
    issuer = Issuer()
    yield issuer
    text = " ".join(each.getMessage() for each in caplog.get_records("call"))
    assert "live proxies" in text
    assert issuer.given
    assert not any(part in text for token in issuer.given for part in token.split("."))


@pytest.fixture
def settings(tmp_path: Path, issuer: Issuer) -> dict[str, Any]:
    """Return the settings of a proxy that trusts the issuer."""
    return {**issuer.trusted_in(tmp_path), "token_skew_s": 0.0}


def bearer(token: str, *more: tuple[str, str]) -> Headers:
    """Return the metadata of a call with a token."""
    return (("authorization", f"Bearer {token}"), *more)


def put(client: Client, metadata: Headers) -> Stream:
    """Open a stream with metadata."""
    method: Any = client.channel.stream_stream(
        f"/{FLIGHT}/DoPut",
        request_serializer=pb.FlightData.SerializeToString,
        response_deserializer=pb.PutResult.FromString,
    )
    return Stream(method(metadata=metadata))


async def opened(client: Client, log: str, metadata: Headers, **options: object) -> Stream:
    """Open a stream that is let in."""
    stream = put(client, metadata)
    await stream.begin(log, **options)
    assert "ready" in (await stream.next_reply() or {}), await stream.status()
    return stream


async def opened_for(
    lasts_s: float, client: Client, log: str, issuer: Issuer, *more: tuple[str, str]
) -> Stream:
    """Open a stream with a token that ends soon; later, if a busy machine lets it end before."""
    while True:
        stream = put(client, bearer(issuer.token(lasts_s=lasts_s), *more))
        await stream.begin(log)
        if "ready" in (await stream.next_reply() or {}):
            return stream
        assert (await stream.status())[0] == "UNAUTHENTICATED"
        lasts_s *= 2


async def act(client: Client, metadata: Headers, action: str = "logs") -> Any:
    """Perform an action with metadata."""
    method: Any = client.channel.unary_stream(
        f"/{FLIGHT}/DoAction",
        request_serializer=pb.Action.SerializeToString,
        response_deserializer=pb.Result.FromString,
    )
    request = pb.Action(type=action, body=b"{}")
    (result,) = [each async for each in method(request, metadata=metadata)]
    return json.loads(result.body)


async def refusal(client: Client, metadata: Headers) -> str:
    """Return why a call is refused for want of a proof."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await act(client, metadata)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert dict(refused.value.trailing_metadata() or ())["dlog-error"] == "401"
    text = refused.value.details() or ""
    given = [str(value).split(" ")[-1] for _, value in metadata]
    assert not any(each in text for each in given if len(each) > 10)
    return text


def test_a_user_is_known_by_a_token(settings: dict[str, Any], issuer: Issuer) -> None:
    """In any case of the scheme; each user has its own quotas, also beside others on its host."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(**settings, principal_streams_max=1)
        token = issuer.token("alice")
        assert await act(client, (("authorization", f"bearer  {token}"),)) == {"logs": []}
        first = await opened(client, "a", bearer(token))
        again = put(client, bearer(issuer.token("alice")))
        await again.begin("a")
        assert await again.next_reply() is None
        code, text, _ = await again.status()
        assert (code, "user:alice has 1 streams open" in text) == ("RESOURCE_EXHAUSTED", True)
        others = [await opened(client, "a", each) for each in (bearer(issuer.token("bob")), ())]
        for each in (first, *others):
            await each.last_reply()

    with_proxies("a")(scenario)


def test_a_token_that_is_refused_is_not_passed_over(
    settings: dict[str, Any], issuer: Issuer
) -> None:
    """Though callers without one are served; and the error says what is wrong."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(**settings)
        assert await act(client, ()) == {"logs": []}
        token = issuer.token()
        for metadata, text in (
            (bearer(token[:-8] + "AAAAAAAA"), "signature"),
            (bearer(Issuer().token()), "signature"),
            (bearer(Issuer("https://other.example").token()), "signature"),
            (bearer(issuer.token(lasts_s=-1)), "has expired"),
            (bearer(issuer.token(nbf=time.time() + 60)), "nbf"),
            (bearer(forged(token, "none")), "algorithm 'none'"),
            (bearer(forged(token, "HS256", issuer.key_set())), "algorithm 'HS256'"),
            (bearer(""), "three parts"),
            ((("authorization", token),), "another scheme"),
            ((("authorization", "Basic YTpi"),), "another scheme"),
            ((*bearer(token), *bearer(token)), "expected a token"),
            ((("auth-token-bin", b"secret of mine"),), "expected a token"),
        ):
            assert text in await refusal(client, metadata)
        for method in ("DoGet", "ListFlights", "GetFlightInfo", "GetSchema", "ListActions"):
            begin: Any = client.channel.unary_stream(f"/{FLIGHT}/{method}")
            call = begin(b"", metadata=bearer("x"))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
        stream = put(client, bearer("x"))
        await stream.begin("a")
        assert await stream.next_reply() is None
        assert (await stream.status())[0] == "UNAUTHENTICATED"

    with_proxies("a")(scenario)


def test_callers_without_a_proof_may_be_refused(settings: dict[str, Any], issuer: Issuer) -> None:
    """Also those who say that a proxy forwards them: they may try again."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(**settings, anonymous="refused")
        assert "without a proof" in await refusal(client, ())
        assert await act(client, bearer(issuer.token())) == {"logs": []}
        forged = (("dlog-forwarded-by", "grpc://x:1"), ("dlog-forwarded-for-bin", b"user:root"))
        with pytest.raises(grpc.aio.AioRpcError, match="not known now") as refused:
            await act(client, forged)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    with_proxies("a")(scenario)


def test_refused_proofs_are_in_the_audit_log(
    settings: dict[str, Any], issuer: Issuer, tmp_path: Path
) -> None:
    """With the host and the reason, and without the token; calls that are let in are not."""
    path = tmp_path / "audit.jsonl"

    async def scenario(served: Proxies) -> None:
        client = await served.start(**settings, anonymous="refused", audit_file=str(path))
        await act(client, bearer(issuer.token()))
        await refusal(client, ())
        await refusal(client, bearer(issuer.token(lasts_s=-1)))
        call: Any = client.channel.stream_stream(f"/{FLIGHT}/Handshake")(metadata=bearer("x"))
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED

    with_proxies("a")(scenario)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(each["principal"], each["address"], each["entrance"]) for each in lines] == [
        ("anonymous", "127.0.0.1", "DoAction"),
        ("anonymous", "127.0.0.1", "DoAction"),
        ("anonymous", "127.0.0.1", "Handshake"),
    ]
    for each, reason in zip(lines, ("without a proof", "expired", "another scheme"), strict=True):
        assert reason in each["result"]
    parts = [part for token in issuer.given for part in token.split(".")]
    assert not any(part in path.read_text() for part in parts)


def test_rights_of_a_call_that_a_draining_proxy_forwards_are_not_known(
    settings: dict[str, Any], issuer: Issuer
) -> None:
    """Its client may try again elsewhere; the rights of the named caller are not given."""

    async def scenario(served: Proxies) -> None:
        direct = await served.cluster.open("operator")
        await direct.change_access_rules(add=["allow user:alice manage namespace"])
        client = await served.start(**settings)
        forged = (("dlog-forwarded-by", "grpc://x:1"), ("dlog-forwarded-for-bin", b"user:alice"))
        for metadata, status in ((forged, "UNAVAILABLE"), ((), "PERMISSION_DENIED")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await act(client, metadata, "drain")
            assert refused.value.code().name == status
        await act(client, bearer(issuer.token()), "drain")

    with_proxies("a")(scenario)


def test_a_proxy_that_checks_no_tokens_refuses_them(issuer: Issuer) -> None:
    """The user that sends one must not believe that it protects the connection."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        assert "this proxy checks none" in await refusal(client, bearer(issuer.token()))

    with_proxies("a")(scenario)


def test_a_handshake_gives_the_token_back(settings: dict[str, Any], issuer: Issuer) -> None:
    """In the header that a client sends from then on; a password that is no token is refused."""

    async def shake(client: Client, metadata: Headers) -> Any:
        call: Any = client.channel.stream_stream(f"/{FLIGHT}/Handshake")(metadata=metadata)
        with suppress(asyncio.InvalidStateError):  # it is refused already
            await call.done_writing()
        return call

    async def scenario(served: Proxies) -> None:
        client = await served.start(**settings)
        token = issuer.token()
        pair = base64.b64encode(f"alice:{token}".encode()).decode()
        call = await shake(client, (("authorization", f"Basic {pair}"),))
        assert await call.code() is grpc.StatusCode.OK
        assert dict(await call.trailing_metadata())["authorization"] == f"Bearer {token}"
        for metadata in (
            (), (("authorization", "Basic !"),), (("authorization", "Basic YTpi"),),
            (("authorization", f"Bearer {token}"),), (("authorization", "Basic /w=="),),
        ):  # fmt: skip
            call = await shake(client, metadata)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, metadata
            assert token not in await call.details()

    with_proxies("a")(scenario)


async def write_to_the_end(stream: Stream) -> None:
    """Write until a message says that the stream ends; take the acknowledgements after it."""
    count = acked = 0
    is_ending = False
    while True:
        if not is_ending:
            count += 1
            await stream.send(b"%d" % count)
        reply = await stream.next_reply()
        if reply is None:
            assert is_ending, await stream.status()
            return
        if "draining" in reply:
            is_ending = True
            continue
        assert acked < reply["acked"] <= count
        acked = reply["acked"]
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("is_forwarded", [False, True])
def test_a_writing_stream_ends_with_its_token(
    settings: dict[str, Any], issuer: Issuer, *, is_forwarded: bool
) -> None:
    """Accepted records are acknowledged; the client learns of the end, or ends the stream."""

    async def scenario(served: Proxies) -> None:
        here, there, log = await two(served, **settings)
        client, more = (here, (("dlog-forward", "true"),)) if is_forwarded else (there, ())
        stream = await opened_for(1.0, client, log, issuer, *more)
        await write_to_the_end(stream)
        code, text, metadata = await stream.status()
        assert (code, metadata["dlog-error"]) == ("UNAUTHENTICATED", "401")
        assert "the token of user:alice has expired during the stream" in text
        stream = await opened_for(0.5, client, log, issuer, *more)
        assert "draining" in (await stream.next_reply() or {})
        assert await stream.last_reply() is None
        assert (await stream.status())[0] == "OK"

    with_proxies(*LOGS)(scenario)


def test_a_later_token_on_the_connection_lets_streams_go_on(
    settings: dict[str, Any], issuer: Issuer
) -> None:
    """Only a token of the same user on the same connection counts."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(**settings)
        address = served.servers[0].address
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            elsewhere = type(client)(channel)
            short = bearer(issuer.token(lasts_s=2.0))
            mine, other = await opened(client, "a", short), await opened(elsewhere, "a", short)
            await act(elsewhere, bearer(issuer.token("bob")))
            await act(client, bearer(issuer.token(lasts_s=1.0)))
            renewed = time.time()
            await act(client, bearer(issuer.token(lasts_s=60)))
            assert "draining" in (await other.next_reply() or {})
            assert await other.next_reply() is None
            assert time.time() > renewed + 0.5
            await mine.send(b"x")
            assert (await mine.last_reply() or {})["acked"] == 1
            assert (await mine.status())[0] == "OK"

    with_proxies("a")(scenario)


def test_a_reading_stream_ends_with_its_token(settings: dict[str, Any], issuer: Issuer) -> None:
    """Also while it waits for records; and one that stages, of which nothing remains."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(**settings)
        ticket = pb.Ticket(ticket=json.dumps({"log": "a", "follow": True}).encode())
        method: Any = client.channel.unary_stream(
            f"/{FLIGHT}/DoGet", request_serializer=pb.Ticket.SerializeToString
        )
        call = method(ticket, metadata=bearer(issuer.token(lasts_s=0.5)))
        with pytest.raises(grpc.aio.AioRpcError, match="has expired during the stream") as ended:
            async for _ in call:
                pass
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stream = put(client, bearer(issuer.token(lasts_s=0.5)))
        first = data_of(PAYLOADS.serialize())
        first.flight_descriptor.type = pb.FlightDescriptor.CMD
        first.flight_descriptor.cmd = b'{"staging": "job"}'
        await stream.call.write(first)
        assert "ready" in (await stream.next_reply() or {}), await stream.status()
        while await stream.next_reply() is not None:
            pass
        code, text, _ = await stream.status()
        assert (code, "has expired during the stream" in text) == ("UNAUTHENTICATED", True)

    with_proxies("a")(scenario)


def test_settings_that_do_not_fit_are_refused() -> None:
    """With what would be right."""
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"token_issuer": ISSUER}, "expected one with a token_issuer"),
        ({"token_audience": AUDIENCE}, "expected one with a token_issuer"),
        ({"token_keys": "keys.json"}, "expected a token_issuer, too"),
        ({"token_principal": ""}, "expected the name of a claim"),
        ({"anonymous": "yes"}, "expected allowed or refused"),
    )
    for given, text in wrong:
        with pytest.raises(ConfigurationError, match=text):
            ProxyConfig(**given)
