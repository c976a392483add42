"""The port for operators of a server: its metrics and its health, over HTTP.

A scrape reads what the server has counted anyway.  It runs on the server's loop, and takes some
milliseconds; a trial of `/health/works` writes something, so all callers of a while share one.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dlcore.base.access.entrances import Entrance
from dlcore.base.background import BackgroundTasks, outcome_of, reported_to_callers
from dlcore.base.clock import SystemClock, steady_s
from dlcore.base.errors import DLError
from dlcore.base.features import own_release
from dlcore.base.health import Readiness, Trial
from dlcore.base.http_options import http_address_of
from dlcore.base.listening.http_server import HttpServer, Route
from dlcore.base.metrics import CONTENT_TYPE, SampleCollector, exposition, gauge

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence

    from aiohttp import web

    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.base.health import Check
    from dlcore.base.http_options import HttpOptions
    from dlcore.base.metrics import Metric, Sample, Source

logger = logging.getLogger(__name__)

TRIAL_PAUSE_S = 10.0
"""A trial's result is the answer for this time."""
# Less than the time of a request (`HttpBounds.request_s`), so that the caller gets the reason.
_TRIAL_S = 8.0

INFO = gauge("build_info", "1, with the version and the role of the process", "role", "version")
READY = gauge("ready", "Whether all checks of `/health/ready` hold (1 or 0)")
CHECK = gauge("check_ok", "Whether a check of `/health/ready` holds (1 or 0)", "check")
CERTIFICATE = gauge(
    "certificate_expires_timestamp_seconds",
    "When the first certificate in use expires, in seconds since 1970; only with TLS",
)
METRICS = (INFO, READY, CHECK, CERTIFICATE)
"""The metrics of every server."""


def _path(name: str, resource: str, cost: str) -> Entrance:
    return Entrance(
        name=f"GET {name}",
        resource=resource,
        right="none",
        callers="every caller that can connect; with `http_tls=required` a certificate of `tls_ca`",
        cost=cost,
        logged="nothing",
    )


LIVE = _path("/health/live", "that the process answers", "one request of at most 72 KiB")
READY_PATH = _path("/health/ready", "the named checks of the process", "some attributes")
WORKS = _path(
    "/health/works", "a trial of the process's own", "one small write and read in 10 s at most"
)
SCRAPE = _path("/metrics", "the counts of the process", "some milliseconds")
ENTRANCES = (LIVE, READY_PATH, WORKS, SCRAPE)
"""The paths, in the order of the documentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operated:
    """A server as its operators see it.

    Args:
        role: its kind.
        metrics: the metrics of its own.
        sources: return their samples.
        checks: what makes it ready, by name; the one of certificates in use is added.
        trial: tries whether it works; raises a `DLError` if not.
    """

    role: str
    metrics: Sequence[Metric]
    sources: Sequence[Source]
    checks: Mapping[str, Check]
    trial: Callable[[], Awaitable[None]]


def certificate_check(tls: TlsInUse, now_ms: Callable[[], int]) -> Check:
    """Return the check that no certificate in use has expired."""

    def check() -> str | None:
        expires_ms = tls.expires_at_ms
        if expires_ms is None or now_ms() < expires_ms:
            return None
        return "a certificate has expired: put a new one in its place"

    return check


@asynccontextmanager
async def operator_port(
    options: HttpOptions, operated: Operated, tls: TlsInUse | None
) -> AsyncGenerator[HttpServer | None, None]:
    """Serve during the block; None if no address is configured.

    Raises:
        ConfigurationError: it cannot listen there.
    """
    address = http_address_of(options)
    if address is None:
        yield None
        return
    has_tls = tls is not None and options.http_tls != "none"
    context = None
    if tls is not None and has_tls:
        context = partial(tls.server_context, asks_clients=options.http_tls == "required")
    pages = _Pages(operated, tls)
    try:
        async with await HttpServer.start(
            pages.routes(), host=address.host, port=address.port, tls=context
        ) as server:
            scheme = "https" if has_tls else "http"
            logger.info("metrics and health on %s://%s:%d", scheme, address.host, server.port)
            yield server
    finally:
        await pages.aclose()


async def require_free_port(options: HttpOptions, now: HttpOptions) -> None:
    """Require that a port can be opened in the place of the one of `now`, which is open.

    A port that stays the same cannot be tried, because this process listens there.

    Raises:
        ConfigurationError: it cannot listen there.
    """
    address, held = http_address_of(options), http_address_of(now)
    if address is None or (held is not None and held.port == address.port):
        return
    server = await HttpServer.start([], host=address.host, port=address.port)
    await server.aclose()


class _Pages:
    """The answers of one server's port."""

    def __init__(self, operated: Operated, tls: TlsInUse | None) -> None:
        self._operated = operated
        self._tls = tls
        self._checks = dict(operated.checks)
        if tls is not None:
            self._checks["certificates"] = certificate_check(tls, SystemClock().now_ms)
        self._collectors = [
            SampleCollector(METRICS, self._samples),
            SampleCollector(operated.metrics, *operated.sources),
        ]
        self._tasks = BackgroundTasks(reported_to_callers)
        self._running: asyncio.Task[Trial] | None = None
        self._last: Trial | None = None

    def routes(self) -> list[Route]:
        return [
            Route(LIVE, self._live),
            Route(READY_PATH, self._ready),
            Route(WORKS, self._works),
            Route(SCRAPE, self._scrape),
        ]

    async def aclose(self) -> None:
        """End a trial."""
        await self._tasks.aclose()

    def _samples(self) -> Iterator[Sample]:
        readiness = Readiness.of(self._checks)
        yield INFO.of(1, self._operated.role, own_release().version)
        yield READY.of(readiness.is_ready)
        for name, reason in readiness.reasons.items():
            yield CHECK.of(reason is None, name)
        expires_ms = None if self._tls is None else self._tls.expires_at_ms
        if expires_ms is not None:
            yield CERTIFICATE.of(expires_ms / 1000)

    async def _live(self, _: web.Request) -> web.Response:
        return _json({"live": True}, is_good=True)

    async def _ready(self, _: web.Request) -> web.Response:
        readiness = Readiness.of(self._checks)
        return _json(readiness.shown(), is_good=readiness.is_ready)

    async def _works(self, _: web.Request) -> web.Response:
        trial = await self._tried()
        return _json(trial.shown(now_s=steady_s()), is_good=trial.reason is None)

    async def _scrape(self, _: web.Request) -> web.Response:
        from aiohttp import web

        return web.Response(
            body=exposition(self._collectors), headers={"Content-Type": CONTENT_TYPE}
        )

    async def _tried(self) -> Trial:
        if self._last is not None and steady_s() < self._last.ended_s + TRIAL_PAUSE_S:
            return self._last
        if self._running is None:
            self._running = self._tasks.start(self._try(), name="a trial")
        return await outcome_of(self._running)

    async def _try(self) -> Trial:
        begun_s, reason = steady_s(), None
        try:
            async with asyncio.timeout(_TRIAL_S):
                await self._operated.trial()
        except TimeoutError:
            reason = f"it took longer than {_TRIAL_S:g} s"
        except DLError as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._running = None
        now_s = steady_s()
        self._last = Trial(now_s, now_s - begun_s, reason)
        return self._last


def _json(answer: dict[str, object], *, is_good: bool) -> web.Response:
    from aiohttp import web

    return web.Response(
        body=msgspec.json.encode(answer) + b"\n",
        status=200 if is_good else 503,
        content_type="application/json",
    )
