"""A token of a user stays within TLS, whatever location a proxy of the endpoint names."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from dlcore.backends.flight import planning
from dlcore.backends.flight.endpoint import token_at
from dlcore.base.errors import ProxyUnavailableError
from dlcore.flight import actions
from dlcore.flight.answers import LogOwner, ReleasedLog
from dlcore.ops.cli import proxy
from dlcore.ops.cli.console import changing, looking
from dlcore.ops.cli.console.changing import Asked, Changing
from dlcore.ops.cli.console.looking import Looking
from dlcore.ops.diagnosis import asking
from tests.fixtures.aio import run

if TYPE_CHECKING:
    from dlcore.api.namespace import Namespace
    from dlcore.backends.flight.endpoint import Endpoint

SECURE, PLAIN = "grpc+tls://proxy:1", "grpc://proxy:1"


def token() -> str:
    """Return the user's."""
    return "secret"


@pytest.mark.parametrize(
    ("endpoint", "location", "is_sent"),
    [
        (SECURE, PLAIN, False),
        (SECURE, SECURE, True),
        (PLAIN, PLAIN, True),
        (PLAIN, SECURE, True),
        (None, PLAIN, True),
    ],
)
def test_a_token_does_not_leave_tls(endpoint: str | None, location: str, is_sent: bool) -> None:
    """Where the user has asked for TLS, by the endpoint or by files."""
    assert (token_at(location, token, endpoint=endpoint, tls=None) is token) == is_sent
    assert (token_at(location, token, endpoint=endpoint, tls=cast("Any", 1)) is token) == (
        location == SECURE
    )


@pytest.mark.parametrize("endpoint", [SECURE, PLAIN])
def test_each_call_to_a_named_location_asks(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console's and those of `dlog proxy`; no proxy is called here."""
    sent: list[tuple[str, bool]] = []

    async def act(calls: Endpoint, action: Any, _: Any) -> Any:
        sent.append((calls.locations.at(0), calls._bearer is not None))
        await asyncio.sleep(0)
        if action is actions.HEALTH:
            raise ProxyUnavailableError("no proxy answers")
        return LogOwner(PLAIN, "1") if action is actions.OWNER else ReleasedLog(released=True)

    async def scenario() -> None:
        namespace = cast("Namespace", None)
        changes = Changing(namespace, endpoint=endpoint, tls=None, token=token)
        await changes.release(Asked(log="a", log_id="1"))
        looks = Looking(namespace, endpoint=endpoint, tls=None, token=token, repairs=None)
        await looks._health(PLAIN)
        await proxy._release(endpoint, "a", patience_s=1.0)
        await asking.ask_proxies([PLAIN], tls=None, token=token, endpoint=endpoint)

    for module in (changing, looking, planning):
        monkeypatch.setattr(module, "act", act)
    monkeypatch.setattr(proxy, "namespace_tls", lambda: None)
    monkeypatch.setattr(proxy, "proxy_token", lambda: token)
    run(scenario())
    named = [is_sent for location, is_sent in sent if location == PLAIN]
    if endpoint == SECURE:
        assert named == [False] * 4
        assert sent.count((SECURE, True)) == 2
    else:
        assert named == [True] * 6
