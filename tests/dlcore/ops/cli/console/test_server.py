"""The console's port: every entrance by each kind of caller, changes with the user's rights, tails.

Method: the console over clusters and proxies in memory, and an HTTP client that sends anything.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pyarrow as pa
import pytest

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.access.tls_in_use import TlsInUse
from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.cli.console import server as console_server
from dlcore.ops.cli.console.entrances import ENTRANCES, FILES
from dlcore.ops.cli.console.guard import POLICY, SECRET_HEADER
from dlcore.ops.cli.console.server import Console, start_of
from tests.fixtures.certificates import Authority
from tests.fixtures.memory_namespace import on_log, read_all
from tests.fixtures.served_proxies import with_proxies
from tests.fixtures.tokens import Issuer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dlcore.api.namespace import Namespace
    from dlcore.backends.direct.log import DirectLog
    from tests.fixtures.memory_namespace import MemoryCluster
    from tests.fixtures.served_proxies import Proxies


class Browser:
    """Asks a console as its page does."""

    def __init__(self, console: Console, port: int, session: aiohttp.ClientSession) -> None:
        self.headers = {SECRET_HEADER: console.secret}
        self.url = f"http://127.0.0.1:{port}"
        self.session = session

    async def get(self, path: str, **query: str) -> tuple[int, Any]:
        """Return the status and the value of an answer."""
        asked = self.session.get(f"{self.url}/api/{path}", params=query, headers=self.headers)
        async with asked as answer:
            return answer.status, await answer.json()

    async def post(self, path: str, **body: object) -> tuple[int, Any]:
        """Make a change; return the status and the value of its answer."""
        asked = self.session.post(f"{self.url}/api/{path}", json=body, headers=self.headers)
        async with asked as answer:
            return answer.status, await answer.json()

    @asynccontextmanager
    async def tail(self, **query: str) -> AsyncIterator[Events]:
        """Follow a log."""
        asked = self.session.get(f"{self.url}/api/tail", params=query, headers=self.headers)
        async with asked as answer:
            yield Events(answer)


class Events:
    """The events of a tail."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    async def next(self) -> tuple[str, Any]:
        """Return the next event, its name and value; comments are left out."""
        block = b":"
        while block.startswith(b":"):
            block = await self.answer.content.readuntil(b"\n\n")
        name, data = block.decode().strip().split("\n")
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@asynccontextmanager
async def served(namespace: Namespace, **arguments: Any) -> AsyncIterator[Browser]:
    """Serve a console; yield a browser with its page."""
    console = Console(namespace, **arguments)
    async with (
        await console.serve(host="127.0.0.1", port=0) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Browser(console, server.port, session)


def repairs_of(cluster: MemoryCluster) -> RepairList:
    """Return the list of ledgers that lack copies."""
    ports = cluster.namespaces[0].ports
    return RepairList(ports.store, ports.paths, ports.clock)


async def write(log: DirectLog, *payloads: bytes) -> list[DLSN]:
    """Append records, which are readable then; return their positions."""
    async with await log.open_writer() as writer:
        for n, payload in enumerate(payloads, 1):
            await writer.write(LogRecord(n, payload))
        await writer.flush()
        await writer.commit()
    return [record.dlsn for record in await read_all(log)]


def test_every_entrance_has_its_rule() -> None:
    """Files for all with a policy, the rest with a secret or token; nothing beside the table."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with served(cluster.namespaces[0]) as browser:
            for entrance in ENTRANCES:
                method, path = entrance.name.split(" ")
                open_to_all = 200 if path in FILES else 401
                for host, secret, status in (
                    (None, "", open_to_all),
                    (None, "wrong", open_to_all),
                    ("evil.example", browser.headers[SECRET_HEADER], 421),
                ):
                    headers = {SECRET_HEADER: secret} | ({"Host": host} if host else {})
                    url, kind = browser.url + path, {"Content-Type": "application/json"}
                    asked = browser.session.request(method, url, headers=headers | kind)
                    async with asked as answer:
                        assert (entrance.name, host, answer.status) == (entrance.name, host, status)
                        if status == 200:
                            assert answer.headers["Content-Security-Policy"] == POLICY
            assert {route.entrance for route in Console(log_namespace(cluster)).routes()} == set(
                ENTRANCES
            )
            assert await browser.get("session") == (200, {"uri": "memory", "proxies": False})

    on_log(body)


def log_namespace(cluster: MemoryCluster) -> Namespace:
    """Return the namespace of the test's log."""
    return cluster.namespaces[0]


def test_the_pages_of_a_direct_console() -> None:
    """Bookies, logs with rates and lags, and a log in detail."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        _, second, _ = await write(log, b"one", b"two", b"three")
        await log.move_subscription("ann", dlsn=second)
        async with served(cluster.namespaces[0], repairs=repairs_of(cluster)) as browser:
            status, found = await browser.get("cluster")
            assert status == 200
            assert [each["name"] for each in found["bookies"]] == [
                f"bookie-{n}" for n in range(1, 5)
            ]
            assert found["recovery"]["under_replicated"] == 0
            assert found["proxies"] == []
            _, found = await browser.get("logs", part="click")
            (row,) = found["logs"]
            assert (row["log"], row["records"], row["subscribers"]) == ("clicks", 3, 1)
            assert not found["more"]
            assert (await browser.get("logs", part="other"))[1]["logs"] == []
            _, found = await browser.get("log", log="clicks")
            assert found["status"]["records"] == 3
            assert found["picture"]["segments"][0]["records"] == 3
            (subscriber,) = found["subscribers"]
            assert (subscriber["subscriber"], subscriber["records_behind"]) == ("ann", 2)
            assert found["columns"] is None
            assert (await browser.get("log", log="gone"))[0] == 404
            assert (await browser.get("log", log="no//name"))[0] == 400

    on_log(body)


def test_changes() -> None:
    """Each does what it says, to the log that the page shows and to no later one of its name."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        _, second, third = await write(log, b"one", b"two", b"three")
        await log.move_subscription("ann", dlsn=second)
        about = {"log": "clicks", "log_id": log.log_id}
        async with served(cluster.namespaces[0]) as browser:
            assert await browser.post("truncate", **about, dlsn=str(third)) == (
                200,
                {"changed": True},
            )
            assert await log.get_log_record_count() == 1
            assert (await browser.post("truncate", **about))[0] == 400
            changed = await browser.post("settings", **about, changes={"retention_s": 60})
            assert changed == (200, {"changed": True})
            assert (await log.get_settings()).retention_s == 60
            status, reply = await browser.post("settings", **about, changes={"colour": 1})
            assert (status, reply["kind"]) == (400, "ConfigurationError")
            assert await browser.post("forget", **about, subscriber="ann") == (
                200,
                {"changed": True},
            )
            assert await log.get_subscriptions() == {}
            status, reply = await browser.post("release", **about)
            assert (status, "--endpoint" in reply["error"]) == (400, True)
            assert await browser.post("seal", **about) == (200, {"changed": True})
            assert await log.is_end_of_stream_marked()
            status, reply = await browser.post("delete", log="clicks", log_id="another")
            assert (status, reply["kind"]) == (409, "ConditionFailedError")
            assert await browser.post("delete", **about) == (200, {"changed": True})
            assert (await browser.post("delete", **about))[0] == 404
            assert (await browser.post("seal", log="clicks"))[0] == 400

    on_log(body)


def test_a_tail_begins_near_the_end_and_follows() -> None:
    """Or at a position or time; a sealed log ends it, and a mistake is reported."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        dlsns = await write(log, *[b"%d" % n for n in range(50)])
        async with served(cluster.namespaces[0]) as browser:
            async with browser.tail(log="clicks", **{"from": str(dlsns[48])}) as tail:
                assert await tail.next() == ("start", None)
                name, records = await tail.next()
                assert (name, [each["text"] for each in records]) == ("records", ["48", "49"])
                async with await log.open_writer() as writer:
                    await writer.write(LogRecord(99, b"\xff"))
                    name, records = await tail.next()
                assert [(each["base64"], each["txid"]) for each in records] == [("/w==", "99")]
                await log.mark_end_of_stream()
                assert await tail.next() == ("end", None)
            async with browser.tail(log="clicks") as tail:
                await tail.next()
                _, records = await tail.next()
                assert records[0]["text"] == "31"  # with the last one 20
            async with browser.tail(log="clicks", **{"from": "1970-01-01"}) as tail:
                await tail.next()
                _, records = await tail.next()
                assert records[0]["text"] == "0"
            await log.truncate(dlsns[9])
            async with browser.tail(log="clicks", **{"from": str(dlsns[1])}) as tail:
                await tail.next()
                name, found = await tail.next()
                assert (name, "truncated" in found) == ("failed", True)
            async with browser.tail(log="gone") as tail:
                assert tail.answer.status == 404
            async with browser.tail(log="clicks", **{"from": "now"}) as tail:
                assert tail.answer.status == 400

    on_log(body)


def test_a_tail_of_columns() -> None:
    """Rows come as columns."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        schema = pa.schema([("city", pa.string()), ("fare", pa.float64())])
        await namespace.create_log("trips", schema=schema)
        trips = await namespace.open_log("trips")
        async with await trips.open_writer() as writer:
            rows = pa.record_batch([["Rome", None], [1.5, None]], schema=schema)
            await writer.write_batch(rows)
            await writer.commit()
        async with served(namespace) as browser, browser.tail(log="trips") as tail:
            assert await tail.next() == ("start", ["city", "fare"])
            _name, records = await tail.next()
            assert [each["row"] for each in records] == [
                {"city": "Rome", "fare": "1.5"},
                {"city": None, "fare": None},
            ]
            assert (await browser.get("log", log="trips"))[1]["columns"][0]["name"] == "city"

    on_log(body)


def test_tails_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused; one that its page has left is noticed, and makes room."""
    monkeypatch.setattr(console_server, "TAILS_MAX", 1)
    monkeypatch.setattr("dlcore.ops.cli.console.looking.KEEP_S", 0.01)

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        async with served(cluster.namespaces[0]) as browser:
            async with browser.tail(log="clicks") as tail:
                await tail.next()
                async with browser.tail(log="clicks") as second:
                    assert second.answer.status == 429
                tail.answer.close()
            status = 429
            while status == 429:
                await asyncio.sleep(0.01)
                async with browser.tail(log="clicks") as third:
                    status = third.answer.status
            assert status == 200

    on_log(body)


@pytest.fixture
def issuer() -> Issuer:
    """The signer of the tokens of users."""
    return Issuer()


def test_a_console_over_proxies_has_its_users_rights(tmp_path: Path, issuer: Issuer) -> None:
    """A reader looks and cannot change; a manager can. Proxies tell of themselves alone."""

    async def scenario(proxies: Proxies) -> None:
        await proxies.start(**issuer.trusted_in(tmp_path), anonymous="refused")
        location = proxies.servers[0].location
        direct = proxies.cluster.namespaces[0]
        await direct.change_access_rules(
            add=["allow user:reader read namespace", "allow user:owner manage namespace"]
        )
        tokens: dict[str, Callable[[], str]] = {
            user: (lambda user=user: issuer.token(user))  # type: ignore[misc]
            for user in ("reader", "owner")
        }
        about = {"log": "clicks", "log_id": (await direct.open_log("clicks")).log_id}
        for user, status in (("reader", 403), ("owner", 200)):
            token = tokens[user]
            async with (
                await open_namespace(location, token=token) as namespace,
                served(namespace, endpoint=location, token=token) as browser,
            ):
                assert (await browser.get("session"))[1]["proxies"]
                _, found = await browser.get("cluster")
                assert (found["bookies"], found["recovery"]) == (None, None)
                assert [(each["location"], each["state"]) for each in found["proxies"]] == [
                    (location, "serving")
                ]
                assert (await browser.get("log", log="clicks"))[1]["status"]["quorum"] is None
                assert [each["log"] for each in (await browser.get("logs"))[1]["logs"]] == [
                    "clicks"
                ]
                assert (await browser.post("release", **about))[0] == status
                assert (await browser.post("seal", **about))[0] == status
                assert (await browser.post("delete", **about))[0] == status

    with_proxies("clicks")(scenario)


def test_over_tls_the_address_is_another(tmp_path: Path) -> None:
    """The page is at https, under the name of the certificate."""
    in_use = TlsInUse(Authority(tmp_path / "authority").issue("console"))

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        console = Console(cluster.namespaces[0])
        serving = await console.serve(
            host="127.0.0.1", port=0, tls=lambda: in_use.server_context(asks_clients=False)
        )
        headers = {SECRET_HEADER: console.secret}
        async with serving as server, aiohttp.ClientSession(headers=headers) as session:
            url = f"https://127.0.0.1:{server.port}"
            for origin, status in ((url, 200), (url.replace("https", "http"), 403)):
                asked = session.get(
                    f"{url}/api/session",
                    ssl=in_use.client_context(),
                    headers={"Origin": origin},
                )
                async with asked as answer:
                    assert answer.status == status

    on_log(body)


def test_a_recovery_list_is_counted_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ledgers lack copies."""
    monkeypatch.setattr("dlcore.ops.cli.console.looking._LEDGERS_MAX", 2)

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        repairs = repairs_of(cluster)
        async with served(cluster.namespaces[0], repairs=repairs) as browser:
            for ledger_id, reason in ((1, (1, False)), (2, (2, False)), (3, (2, True))):
                await repairs.publish(ledger_id, missing=())
                recovery = (await browser.get("cluster"))[1]["recovery"]
                assert (recovery["under_replicated"], recovery["more"]) == reason

    on_log(body)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("", (None, None)),
        ("3:17:0", (DLSN(3, 17, 0), None)),
        ("1970-01-01T00:00:01Z", (None, 1000)),
        ("5000", (None, 5000)),
    ],
)
def test_starts_of_tails(text: str, start: tuple[DLSN | None, int | None]) -> None:
    """A position, a time, or nothing."""
    assert start_of(text) == start


def test_wrong_starts_of_tails() -> None:
    """The error says what would be right."""
    with pytest.raises(ConfigurationError, match="expected one like"):
        start_of("yesterday")
