"""Questions to all servers of a cluster at once: the state of each, and its clock."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dlcore.backends.flight import planning
from dlcore.backends.flight.endpoint import Endpoint, token_at
from dlcore.base.background import together
from dlcore.base.clock import SystemClock
from dlcore.base.errors import DLError
from dlcore.flight import actions
from dlcore.flight.requests import NoRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from dlcore.base.access.tls import TlsFiles
    from dlcore.flight.answers import ProxyHealth
    from dlcore.ledger.metadata.values import BookieRegistration
    from dlcore.wire.control import BookieInfo, ControlClient

PATIENCE_S = 5.0
"""Longest wait for one server; the others are asked meanwhile."""


class Report(Protocol):
    """A server's own report."""

    @property
    def clock_ms(self) -> int | None:
        """Its clock; None if its release does not report it."""


_Report = TypeVar("_Report", bound=Report)


@dataclass(frozen=True, slots=True)
class Answer(Generic[_Report]):
    """The answer of a server, or why there is none."""

    server: str
    report: _Report | None
    problem: str = ""
    ahead_ms: float | None = None
    """How far its clock is ahead of ours, if it reports one."""
    within_ms: float = 0.0
    """How far off `ahead_ms` may be: half of the time for the answer."""


async def ask_bookies(
    bookies: Iterable[BookieRegistration], control: ControlClient
) -> list[Answer[BookieInfo]]:
    """Return the answer of each registered bookie, by name."""
    ordered = sorted(bookies, key=lambda each: each.bookie)
    found = await together(
        *(
            _asked(each.name, lambda each=each: control.ask(each.bookie, each.control_address))  # type: ignore[misc]
            for each in ordered
        )
    )
    return list(found)


async def ask_proxies(
    locations: Iterable[str],
    *,
    tls: TlsFiles | None,
    token: Callable[[], str] | None,
    endpoint: str | None = None,
) -> list[Answer[ProxyHealth]]:
    """Return the answer of the proxy at each location, by location; `endpoint` has named them."""

    async def ask(location: str) -> ProxyHealth:
        own = token_at(location, token, endpoint=endpoint, tls=tls)
        # Its own patience ends before the timeout of `_asked`, whose error names no cause.
        async with Endpoint(location, patience_s=PATIENCE_S / 2, tls=tls, token=own) as calls:
            return await planning.act(calls, actions.HEALTH, NoRequest())

    found = await together(
        *(_asked(each, lambda each=each: ask(each)) for each in sorted(locations))  # type: ignore[misc]
    )
    return list(found)


async def _asked(server: str, ask: Callable[[], Awaitable[_Report]]) -> Answer[_Report]:
    clock, now_s = SystemClock(), asyncio.get_running_loop().time
    sent_ms, sent_s = clock.now_ms(), now_s()
    try:
        async with asyncio.timeout(PATIENCE_S):
            report = await ask()
    except DLError as error:
        return Answer(server, None, str(error))
    except TimeoutError:
        return Answer(server, None, f"no answer within {PATIENCE_S:g} s")
    if report.clock_ms is None:
        return Answer(server, report)
    within_ms = (now_s() - sent_s) * 1000 / 2
    return Answer(server, report, "", report.clock_ms - sent_ms - within_ms, within_ms)
