"""The port for operators: what it serves, and that a trial is shared and bounded."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dlcore.base.access.tls_in_use import TlsInUse
from dlcore.base.errors import MetadataConnectionError
from dlcore.base.listening import operator_port as module
from dlcore.base.listening.operator_port import (
    ENTRANCES,
    Operated,
    certificate_check,
    operator_port,
)
from dlcore.base.metrics import counter
from dlcore.metadata.operated import METRICS as METADATA_METRICS, session_check, source_of
from tests.fixtures.aio import run
from tests.fixtures.certificates import Authority
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from dlcore.metadata.port import MetadataStore

WORK = counter("work_total", "Work done")


@dataclass
class Options:
    """The part of a configuration."""

    http_address: str = "127.0.0.1:0"
    http_tls: str = "none"


@dataclass
class Server:
    """A server that an operator looks at."""

    store: MetadataStore
    is_good: bool = True
    trials: int = 0
    hangs: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def trial(self) -> None:
        """Succeed, hang or fail, as configured."""
        self.trials += 1
        self.begun.set()
        if self.hangs:
            await asyncio.Event().wait()
        if not self.is_good:
            raise MetadataConnectionError("no server answers")

    def operated(self) -> Operated:
        """Return what its operators see."""
        return Operated(
            role="worker",
            metrics=[*METADATA_METRICS, WORK],
            sources=[source_of(self.store), lambda: [WORK.of(3)]],
            checks={"store": session_check(self.store), "own": self.check},
            trial=self.trial,
        )

    def check(self) -> str | None:
        """Tell whether it is good."""
        return None if self.is_good else "it is not good"


@asynccontextmanager
async def served() -> AsyncGenerator[tuple[Server, Any]]:
    """A server and a function that gets a path: the status and the answer's JSON, or text."""
    store = SimulatedTree().connect()
    server = Server(store)
    async with (
        operator_port(Options(), server.operated(), None) as opened,
        aiohttp.ClientSession() as session,
    ):
        assert opened is not None

        async def get(path: str) -> tuple[int, Any]:
            async with session.get(f"http://127.0.0.1:{opened.port}{path}") as answer:
                is_json = answer.content_type == "application/json"
                return answer.status, await (answer.json() if is_json else answer.text())

        yield server, get
    await store.aclose()


def test_live_and_ready() -> None:
    """It is live even when it is not ready, and the answer names the check that fails."""

    async def scenario() -> None:
        async with served() as (server, get):
            assert await get("/health/live") == (200, {"live": True})
            assert (await get("/health/ready"))[0] == 200
            server.is_good = False
            status, answer = await get("/health/ready")
            assert status == 503
            assert answer["checks"]["own"] == {"ok": False, "reason": "it is not good"}
            assert answer["checks"]["store"] == {"ok": True}
            assert await get("/health/live") == (200, {"live": True})

    run(scenario())


def test_the_metrics_can_be_parsed() -> None:
    """They are those of the server, of every server, and of the process."""

    async def scenario() -> None:
        async with served() as (server, get):
            server.is_good = False
            status, text = await get("/metrics")
            found = {
                (sample.name, *sample.labels.values()): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            assert status == 200
            assert found["dlog_work_total",] == 3
            assert found["dlog_ready",] == 0
            assert found["dlog_check_ok", "own"] == 0
            assert found["dlog_check_ok", "store"] == 1
            assert found["dlog_metadata_connected",] == 1
            assert found["process_open_fds",] > 0
            assert "dlog_certificate_expires_timestamp_seconds" not in text

    run(scenario())


def test_many_callers_share_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come during a trial, and soon after, get its result; later there is another."""
    monkeypatch.setattr(module, "TRIAL_PAUSE_S", 1000.0)

    async def scenario() -> None:
        async with served() as (server, get):
            answers = await asyncio.gather(*(get("/health/works") for _ in range(5)))
            assert {status for status, _ in answers} == {200}
            server.is_good = False
            assert (await get("/health/works"))[0] == 200
            assert server.trials == 1
            monkeypatch.setattr(module, "TRIAL_PAUSE_S", 0.0)
            status, answer = await get("/health/works")
            assert (status, server.trials) == (503, 2)
            assert answer["reason"] == "MetadataConnectionError: no server answers"

    run(scenario())


def test_a_trial_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as failed after its time."""
    monkeypatch.setattr(module, "_TRIAL_S", 0.05)

    async def scenario() -> None:
        async with served() as (server, get):
            server.hangs = True
            status, answer = await get("/health/works")
            assert status == 503
            assert "longer than" in answer["reason"]

    run(scenario())


def test_closing_ends_a_trial() -> None:
    """Nothing is left behind, also if callers wait."""

    async def scenario() -> None:
        store = SimulatedTree().connect()
        server = Server(store, hangs=True)
        async with operator_port(Options(), server.operated(), None) as opened:
            assert opened is not None
            reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
            writer.write(b"GET /health/works HTTP/1.1\r\nHost: x\r\n\r\n")
            await server.begun.wait()
        assert not await reader.read()
        writer.close()
        await store.aclose()

    run(scenario())


def test_without_an_address_there_is_no_port() -> None:
    """That is the default."""

    async def scenario() -> None:
        store = SimulatedTree().connect()
        server = Server(store)
        async with operator_port(Options(http_address=""), server.operated(), None) as opened:
            assert opened is None
        await store.aclose()

    run(scenario())


@pytest.mark.parametrize(("mode", "lets_in"), [("server", True), ("required", False)])
def test_tls_as_configured(tmp_path: Path, mode: str, lets_in: bool) -> None:
    """With `server` every client may ask, with `required` only one with a certificate."""
    authority = Authority(tmp_path / "tls")
    own, client = authority.issue("server"), authority.issue("client")
    bare = type(own)(ca=own.ca)

    async def scenario() -> None:
        store = SimulatedTree().connect()
        tls = TlsInUse(own)
        options = Options(http_tls=mode)
        async with (
            operator_port(options, Server(store).operated(), tls) as opened,
            aiohttp.ClientSession() as session,
        ):
            assert opened is not None
            url = f"https://127.0.0.1:{opened.port}/metrics"
            async with session.get(url, ssl=client.client_context()) as answer:
                assert "dlog_certificate_expires_timestamp_seconds" in await answer.text()
            try:
                async with session.get(url, ssl=bare.client_context()) as answer:
                    is_let_in = answer.status == 200
            except aiohttp.ClientError:
                is_let_in = False
            assert is_let_in == lets_in
        await store.aclose()

    run(scenario())


def test_the_checks_of_session_and_certificates(tmp_path: Path) -> None:
    """They hold while the session is connected and until the first certificate expires."""

    async def scenario() -> None:
        store = SimulatedTree().connect()
        check = session_check(store)
        assert check() is None
        store.disconnect()
        assert check() == "the session is suspended"
        await store.aclose()
        tls = TlsInUse(Authority(tmp_path / "tls").issue("server"))
        expires_ms = tls.expires_at_ms
        assert expires_ms is not None
        assert certificate_check(tls, lambda: expires_ms - 1)() is None
        assert certificate_check(tls, lambda: expires_ms)() is not None

    run(scenario())


def test_every_path_is_an_entrance() -> None:
    """The table has what the port serves."""
    paths = {each.name for each in ENTRANCES}
    assert paths == {
        "GET /health/live",
        "GET /health/ready",
        "GET /health/works",
        "GET /metrics",
    }
