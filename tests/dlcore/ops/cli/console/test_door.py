"""The HTTP door over proxies: appends that are sent again, reads, streams, rights and limits.

Method: a console and proxies on one loop, over metadata and bookies in memory, and an HTTP client.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pyarrow as pa
import pytest

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.records import LogRecord
from dlcore.ops.cli.console import door
from tests.fixtures.http_door import EVENTS, JSON, LINES, Caller, door_of, next_event, served
from tests.fixtures.memory_namespace import on_log
from tests.fixtures.served_proxies import with_proxies
from tests.fixtures.tokens import Issuer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dlcore.backends.direct.log import DirectLog
    from tests.fixtures.memory_namespace import MemoryCluster
    from tests.fixtures.served_proxies import Proxies


def test_an_append_that_is_sent_again_is_in_the_log_once() -> None:
    """With the same answer, at another console and another owner; another body is refused."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        await proxies.start()
        async with door_of(proxies) as caller:
            status, first = await caller.append(LINES)
            assert (status, first["records"]) == (200, 2)
            assert await caller.append(LINES) == (200, first)
            status, reply = await caller.append(b"[1]")
            assert (status, reply["kind"]) == (409, "ProducerFencedError")
            assert "'k' belongs to an append of another body" in reply["error"]
            both = await asyncio.gather(*(caller.append(LINES, "both") for _ in range(5)))
            assert all(each == both[0] for each in both)
            assert both[0][0] == 200
            (owner,) = [
                each for each in proxies.servers if each.location == await owner_of(proxies)
            ]
            await owner.aclose()  # the log moves to the other one
            proxies.servers.remove(owner)
            async with door_of(proxies) as other:
                assert await other.append(LINES) == (200, first)
                assert await other.append(LINES, "both") == both[0]
                status, last = await other.append(b'"after"', "next")
                assert status == 200
                status, found = await other.read()
        assert [each["value"] for each in found] == ['{"n": 1}', '{"n": 2}'] * 2 + ['"after"']
        assert [found[n]["dlsn"] for n in (1, 3, 4)] == [
            first["last"],
            both[0][1]["last"],
            last["last"],
        ]

    with_proxies("clicks")(scenario)


async def owner_of(proxies: Proxies) -> str:
    """Return the location of the proxy that owns the log."""
    async with await open_namespace(proxies.servers[0].location) as namespace:
        info = await (await namespace.open_log("clicks"))._info()
    assert info.owner is not None
    return info.owner


def test_reading_by_position() -> None:
    """From the beginning, a position, behind one, a time or the end; pages follow each other."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        async with door_of(proxies) as caller:
            body = b"".join(b"%d\n" % n for n in range(250))
            assert (await caller.append(body))[0] == 200
            status, found = await caller.read()
            assert [each["value"] for each in found] == [str(n) for n in range(250)]
            assert [each["sequence_id"] for each in found] == list(range(250))
            paged, last = [], "0:0:0"
            while page := (await caller.read(after=last, limit="120"))[1]:
                paged += page
                last = page[-1]["dlsn"]
            assert paged == found
            place = found[100]["dlsn"]
            assert (await caller.read(from_=place, limit="3"))[1] == found[100:103]
            moment = str(found[0]["timestamp_ms"])
            assert (await caller.read(from_=moment, limit="1"))[1] == found[:1]
            assert await caller.read(from_="latest") == (200, [])
            assert await caller.read(after=found[-1]["dlsn"]) == (200, [])
            for past in ({"after": "99:0:0"}, {"from_": "99:0:0"}):
                status, (answer,) = await caller.read(**past)
                assert (status, answer["kind"]) == (400, "ConfigurationError")
                assert "past the end of the log: expected at most 1:" in answer["error"]
            url = f"{caller.url}/v1/logs/clicks/records?limit=2"
            async with caller.session.get(url, headers=caller.bearer(None)) as answer:
                assert answer.headers["Dlog-Last"] == found[1]["dlsn"]
                assert answer.content_type == "application/x-ndjson"
            status, reply = await caller.read("gone")
            assert (status, reply[0]["kind"]) == (404, "LogNotFoundError")
            status, reply = await caller.read(limit="0")
            assert (status, reply[0]["kind"]) == (400, "ConfigurationError")

    with_proxies("clicks")(scenario)


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [
        ("GET", "/v1", 404, "path '/v1': expected /v1/logs/LOG/records"),
        ("POST", "/v1/logs/clicks/record", 404, "path '/v1/logs/clicks/record': expected /v1/logs"),
        ("DELETE", "/v1/logs/clicks/records", 405, "method DELETE: expected GET to read, or POST"),
    ],
)
def test_unknown_paths_and_methods(method: str, path: str, status: int, reason: str) -> None:
    """Their answers have the form of all errors; other paths are not the door's."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        async with door_of(proxies) as caller:
            async with caller.session.request(method, f"{caller.url}{path}") as answer:
                assert (answer.status, answer.content_type) == (status, "application/json")
                value = await answer.json()
                assert value["kind"] == "UnknownActionError"
                assert value["error"].startswith(reason)
            async with caller.session.get(f"{caller.url}/v2") as answer:
                assert (answer.status, await answer.text()) == (404, "Not Found\n")

    with_proxies("clicks")(scenario)


def test_columns_that_a_log_has_not() -> None:
    """The error names what the caller wrote, and what the log has."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        async with door_of(proxies) as caller:
            status, reply = await caller.read(columns="value")
            assert status == 400
            assert reply[0]["error"] == (
                "columns='value': log 'clicks' is a log of bytes, which has no columns: leave "
                "columns out"
            )
            schema = pa.schema([("city", pa.string()), ("fare", pa.float64())])
            await proxies.cluster.namespaces[0].create_log("typed", schema=schema)
            for columns, wrong in (("citty", "citty"), ("city,city", "city"), ("", "")):
                status, reply = await caller.read("typed", columns=columns)
                assert status == 400
                assert reply[0]["error"] == (
                    f"columns={columns!r}: {wrong!r} is no column of log 'typed', or named twice: "
                    "expected some of city,fare"
                )

    with_proxies("clicks")(scenario)


def test_positions_that_were_truncated_are_gone() -> None:
    """A client that asks for one gets an error, and not the next records as if none lacked."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        async with door_of(proxies) as caller:
            await caller.append(b"1\n2\n3")
            found = (await caller.read())[1]
            async with await open_namespace(proxies.servers[0].location) as namespace:
                log = await namespace.open_log("clicks")
                await log.mark_end_of_stream()
                await (await proxies.cluster.namespaces[0].open_log("clicks")).truncate(
                    (await log.get_last_dlsn()).next_slot()
                )
            status, reply = await caller.read(after=found[0]["dlsn"])
            assert (status, reply[0]["kind"]) == (410, "AlreadyTruncatedError")
            assert await caller.read() == (200, [])
            status, refused = await caller.append(b"4", "other")
            assert (status, refused["kind"]) == (409, "EndOfStreamError")

    with_proxies("clicks")(scenario)


def test_rows_of_typed_logs() -> None:
    """JSON goes into columns as the schema says, and comes out of them; the wrong line is named."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        schema = pa.schema([("city", pa.string()), pa.field("fare", pa.float64())])
        await proxies.cluster.namespaces[0].create_log("team/trips", schema=schema)
        async with door_of(proxies) as caller:
            rows = b'{"city": "Rome", "fare": 1.5}\n{"city": "Oslo"}\n'
            for log in ("team/trips", "team%2Ftrips"):
                status, reply = await caller.append(rows, log=log)
                assert (status, reply["records"]) == (200, 2)
            status, found = await caller.read("team/trips")
            assert [each["row"] for each in found] == [
                {"city": "Rome", "fare": 1.5},
                {"city": "Oslo", "fare": None},
            ]
            status, found = await caller.read("team/trips", columns="fare")
            assert [each["row"] for each in found] == [{"fare": 1.5}, {"fare": None}]
            status, (reply,) = await caller.read("team/trips", columns="fee")
            assert status == 400
            assert "fee" in reply["error"]
            for wrong, reason in (
                (b'{"city": "Rome"}\n{"fare": "much"}', "line 2: "),
                (b'{"fee": 1}', "line 1: column 'fee'"),
                (b"[1]", "line 1: "),
            ):
                status, reply = await caller.append(wrong, "wrong", log="team/trips")
                assert (status, reply["kind"]) == (400, "ConfigurationError")
                assert reason in reply["error"]
                assert "city" in reply["error"]
            async with caller.events("team/trips") as stream:
                assert (await next_event(stream))[2]["row"] == {"city": "Rome", "fare": 1.5}

    with_proxies()(scenario)


def test_any_bytes_are_a_record() -> None:
    """They come back as base64; what a record holds cannot end its line."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        async with door_of(proxies) as caller:
            octets = {"Content-Type": "application/octet-stream"}
            for n, value in enumerate((b"\xff\n", b"a\n\nid: 9\nevent: end\n\n<script>", b"")):
                status, _ = await caller.append(value, str(n), **octets)
                assert status == 200
            found = (await caller.read())[1]
            assert found[0]["value_base64"] == "/wo="
            assert [each.get("value") for each in found[1:]] == [
                "a\n\nid: 9\nevent: end\n\n<script>",
                "",
            ]
            async with caller.events() as stream:
                for each in found:
                    assert await next_event(stream) == ("", each["dlsn"], each)

    with_proxies("clicks")(scenario)


def test_streams_go_on_behind_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the change of a segment; a sealed log ends them."""
    monkeypatch.setattr(door, "KEEP_S", 0.01)

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        async with door_of(proxies) as caller, caller.events() as stream:
            assert stream.content_type == "text/event-stream"
            _, first = await caller.append(b"1")
            assert (await next_event(stream))[1:2] == (first["last"],)
            async with await open_namespace(proxies.servers[0].location) as namespace:
                await caller.append(b"2", "2")
                assert (await next_event(stream))[2]["value"] == "2"
                await namespace.rename_log("clicks", "clicks2")  # the owner releases it
                await namespace.rename_log("clicks2", "clicks")
                _, third = await caller.append(b"3", "3")
                assert third["last"].split(":")[0] > first["last"].split(":")[0]
                _, last, value = await next_event(stream)
                assert (last, value["value"]) == (third["last"], "3")
                async with caller.events(last=first["last"]) as again:
                    assert [(await next_event(again))[2]["value"] for _ in "23"] == ["2", "3"]
                await (await namespace.open_log("clicks")).mark_end_of_stream()
            assert await next_event(stream) == ("end", "", None)
            assert await stream.content.read() == b""

    with_proxies("clicks")(scenario)


@pytest.fixture
def issuer() -> Issuer:
    """The signer of the tokens of users."""
    return Issuer()


def test_users_have_keys_of_their_own(tmp_path: Path, issuer: Issuer) -> None:
    """Two that choose the same one do not meet; a user's holds for every token of it."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start(**issuer.trusted_in(tmp_path))
        await proxies.cluster.namespaces[0].change_access_rules(
            add=[
                f"allow user:{user} {right} namespace"
                for user in ("ann", "ben")
                for right in ("append", "read")
            ]
        )
        async with door_of(proxies, token=lambda: issuer.token("ann")) as caller:
            of_ann = await caller.append(b"1", token=issuer.token("ann"))
            of_ben = await caller.append(b"2", token=issuer.token("ben"))
            assert (of_ann[0], of_ben[0]) == (200, 200)
            also = await caller.append(b"1", "same", token=issuer.token("ann"))
            assert (await caller.append(b"1", "same", token=issuer.token("ben")))[1] != also[1]
            # The console was started by ann: its secret is one more token of hers.
            for token in (None, issuer.token("ann", lasts_s=900.0)):
                assert await caller.append(b"1", token=token) == of_ann
            assert (await caller.append(b"2", token=issuer.token("ann")))[0] == 409
            _, found = await caller.read()
            assert [each["value"] for each in found] == ["1", "2", "1", "1"]

    with_proxies("clicks")(scenario)


def test_rights_are_those_of_the_token(tmp_path: Path, issuer: Issuer) -> None:
    """And with the console's secret those of the user who started it."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start(**issuer.trusted_in(tmp_path))
        direct = proxies.cluster.namespaces[0]
        await direct.change_access_rules(
            add=["allow user:reader read namespace", "allow user:writer append namespace"]
        )
        owner = lambda: issuer.token("writer")  # noqa: E731 - a function that gives tokens
        async with door_of(proxies, token=owner) as caller:
            for user, may_read, may_append in (
                ("reader", 200, 403),
                ("writer", 403, 200),
                ("unknown", 403, 403),
            ):
                token = issuer.token(user)
                status, reply = await caller.append(LINES, token=token)
                assert (user, status) == (user, may_append)
                assert may_append == 200 or reply["kind"] == "AccessDeniedError"
                status, lines = await caller.read(token=token)
                assert (user, status) == (user, may_read)
                assert may_read == 200 or lines[0]["kind"] == "AccessDeniedError"
            assert (await caller.append(LINES))[0] == 200
            assert (await caller.read())[0] == 403
            for token in ("", "x.y.z", "\u00e9"):
                assert (await caller.append(LINES, token=token))[0] == 401
                status, (reply,) = await caller.read(token=token)
                assert (status, reply["kind"]) == (401, "UnauthenticatedError")
            # A body of an unknown caller is not read: this one never comes.
            url = f"{caller.url}/v1/logs/clicks/records"
            headers = JSON | {"Idempotency-Key": "k"} | caller.bearer("x.y.z")

            async def endless() -> AsyncIterator[bytes]:
                yield b"1"
                await asyncio.Event().wait()

            async with caller.session.post(url, data=endless(), headers=headers) as answer:
                assert answer.status == 401
                assert answer.headers["WWW-Authenticate"] == "Bearer"

    with_proxies("clicks")(scenario)


def test_other_pages_are_refused() -> None:
    """Also with the secret: as for the console's own paths."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        async with door_of(proxies) as caller:
            for name, value, status in (
                ("Origin", "http://evil.example", 403),
                ("Host", "evil.example", 421),
                ("Sec-Fetch-Site", "cross-site", 403),
            ):
                assert (await caller.append(LINES, **{name: value}))[0] == status
            assert await caller.read() == (200, [])

    with_proxies("clicks")(scenario)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of a body, its key and type, and of the open requests."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        async with door_of(proxies) as caller:
            large = b'"%s"' % (b"a" * (1 << 20))
            assert (await caller.append(large))[0] == 413
            assert await answer_to_a_body_in_parts(caller, large) == (413, "LogRecordTooLongError")
            assert (await caller.append(large[1:-9], **{"Content-Type": "text/plain"}))[0] == 400
            assert (await caller.append(b"1", ""))[0] == 400
            assert (await caller.append(b"1", log="no//name"))[0] == 400
            for name in ("APPENDS_MAX", "PAGES_MAX", "STREAMS_MAX"):
                monkeypatch.setattr(door, name, 0)
            status, reply = await caller.append(b"1")
            assert (status, reply["kind"]) == (429, "OverCapacityError")
            assert (await caller.read())[0] == 429
            async with caller.events() as stream:
                assert (stream.status, stream.headers["Retry-After"]) == (429, "1")
            monkeypatch.setattr(door, "PAGES_MAX", 1)
            monkeypatch.setattr(door, "PAGE_S", 0.0)
            assert (await caller.read())[0] == 429

    with_proxies("clicks")(scenario)


def test_a_body_that_is_cut_off_is_an_error_of_its_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is appended, the console's log has no error, and the next append is taken."""
    given_up = asyncio.Event()

    async def note(_: object) -> None:
        given_up.set()

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        async with door_of(proxies) as caller:
            monkeypatch.setattr(door, "_drop_the_rest", note)
            async with sending(caller, "Content-Length: 100", b"1\n2\n3"):
                pass
            await asyncio.wait_for(given_up.wait(), 60)
            assert (await caller.append(b"4", "next"))[0] == 200
            _, found = await caller.read()
        assert [each["value"] for each in found] == ["4"]

    with_proxies("clicks")(scenario)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@asynccontextmanager
async def sending(caller: Caller, size: str, body: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Begin an append whose size is in this header, and send some bytes; then hang up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(caller.url.rpartition(":")[2]))
    head = JSON | {"Idempotency-Key": "k"} | caller.bearer(None)
    lines = ["POST /v1/logs/clicks/records HTTP/1.1", f"Host: {caller.url.partition('//')[2]}"]
    lines += [size, *(f"{name}: {value}" for name, value in head.items())]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


async def answer_to_a_body_in_parts(caller: Caller, body: bytes) -> tuple[int, str]:
    """Send a body without its length; return the status and the kind of the error."""
    parts = b"%x\r\n%s\r\n" % (len(body), body)
    async with sending(caller, "Transfer-Encoding: chunked", parts) as reader:
        answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(answer.lower().partition("content-length: ")[2].split("\r\n")[0])
        reply = json.loads(await reader.readexactly(length))
    return int(answer.split(" ")[1]), reply["kind"]


def test_a_client_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream makes room for another one."""
    monkeypatch.setattr(door, "SEND_S", 0.2)
    monkeypatch.setattr(door, "STREAMS_MAX", 1)

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        log = await proxies.cluster.namespaces[0].open_log("clicks")
        async with await log.open_writer() as writer:
            for n in range(60):
                await writer.write(LogRecord(n, b"a" * 500_000))
            await writer.commit()
        async with door_of(proxies) as caller, caller.events() as stream:
            status = 429
            async with caller.events() as other:
                assert other.status == status
            while status == 429:
                await asyncio.sleep(0.01)
                async with caller.events() as other:
                    status = other.status
            assert status == 200
            await is_cut(stream)

    with_proxies("clicks")(scenario)


async def is_cut(stream: aiohttp.ClientResponse) -> None:
    """Read to the end of an answer, which the server has not ended in order."""
    with pytest.raises(aiohttp.ClientError):
        await stream.read()


def test_streams_end_with_the_console() -> None:
    """However long a log is silent."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        async with aiohttp.ClientSession() as session:
            async with door_of(proxies) as caller:
                await caller.append(b"1")
                url = f"{caller.url}/v1/logs/clicks/records"
                asking = session.get(url, headers=EVENTS | caller.bearer(None))
                stream = await asking
                assert (await next_event(stream))[2]["value"] == "1"
            await is_cut(stream)

    with_proxies("clicks")(scenario)


def test_without_the_setting_and_without_proxies_nothing_is_appended() -> None:
    """Logs are read with the secret alone."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(1, b"one"))
            await writer.commit()
        async with served(cluster.namespaces[0]) as caller:
            status, reply = await caller.append(LINES)
            assert (status, reply["kind"]) == (403, "AccessDeniedError")
            assert "--allow-appends" in reply["error"]
            status, (found,) = await caller.read()
            assert found["value"] == "one"
            assert await caller.read(from_="latest") == (200, [])
            async with caller.events(**{"from": "latest"}) as stream:
                async with await log.open_writer() as writer:
                    await writer.write(LogRecord(2, b"two"))
                    await writer.commit()
                assert (await next_event(stream))[2]["value"] == "two"
            status, (reply,) = await caller.read(token="another")
            assert status == 401
            assert "--endpoint" in reply["error"]

    on_log(body)


def test_a_proxy_that_is_away_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time to ask again."""
    monkeypatch.setattr(door, "PATIENCE_S", 0.1)

    async def scenario(proxies: Proxies) -> None:
        await proxies.start()
        async with door_of(proxies) as caller:
            await proxies.servers[0].aclose()
            url = f"{caller.url}/v1/logs/clicks/records"
            async with caller.session.get(url, headers=caller.bearer(None)) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert (await answer.json())["kind"] == "ProxyUnavailableError"

    with_proxies("clicks")(scenario)
