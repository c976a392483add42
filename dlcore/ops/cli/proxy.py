"""`dlog proxy`: the process that serves logs to Arrow Flight clients."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING

import click

from dlcore.base import event_loop, kept_memory
from dlcore.base.errors import LogNotFoundError
from dlcore.base.seldom import log_to_stderr
from dlcore.base.settings import config_of
from dlcore.ops.cli.context import (
    client_config,
    common_options,
    in_time,
    namespace_endpoint,
    namespace_tls,
    namespace_uri,
    patience,
    program_settings,
    takes_settings,
)
from dlcore.ops.cli.output import show_done
from dlcore.proxy.config import ProxyConfig, proxy_options

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.config import LedgerClientConfig
    from dlcore.base.tls import TlsFiles
    from dlcore.flight.actions import Action
    from dlcore.flight.answers import NoAnswer
    from dlcore.flight.requests import NoRequest


_PATIENCE_S = 10.0


@click.group("proxy")
@common_options
def proxy_group() -> None:
    """Serve logs to Arrow Flight clients."""


@proxy_group.command("run", epilog="Example: dlog proxy run --port 4190")
@takes_settings(proxy_options())
@common_options
def run_proxy(**options: object) -> None:
    """Run one proxy, until interrupted.

    Any number may run, also on one machine.  It prints its location once it serves.  Logs go to
    standard error.  SIGINT (Ctrl-C) and SIGTERM stop it cleanly.

    Its settings may also be in the table [proxy] of the configuration file, and in variables like
    DLOG_PROXY_PORT.  Settings of its bookie client are in the table [ledger_client].
    """
    config = config_of(ProxyConfig, program_settings("proxy", proxy_options(), options))
    client = client_config()
    log_to_stderr()
    logging.getLogger().setLevel(config.log_level.upper())
    kept_memory.keep_what_is_freed()
    event_loop.run(_serve(namespace_uri(), config, namespace_tls(), client))


@proxy_group.command("drain", epilog="Example: dlog proxy drain --endpoint grpc://proxy-1:4190")
@common_options
def drain_proxy() -> None:
    """Make the proxy at --endpoint release all logs and accept none, until it is undrained or ends.

    The command ends once the proxy owns no log; clients are sent to the other proxies.  For load
    balancers the proxy is not ready from the beginning of the drain.
    """
    from dlcore.flight import actions

    _act(actions.DRAIN)
    endpoint = namespace_endpoint()
    show_done(f"{endpoint} takes no logs any more", {"drained": endpoint})


@proxy_group.command("undrain", epilog="Example: dlog proxy undrain --endpoint grpc://proxy-1:4190")
@common_options
def undrain_proxy() -> None:
    """Make the drained proxy at --endpoint accept logs again; it is ready then."""
    from dlcore.flight import actions

    _act(actions.UNDRAIN)
    endpoint = namespace_endpoint()
    show_done(f"{endpoint} takes logs again", {"undrained": endpoint})


def _act(action: Action[NoRequest, NoAnswer]) -> None:
    """Send an action to the one named proxy."""
    from dlcore.backends.flight import planning
    from dlcore.backends.flight.endpoint import Endpoint
    from dlcore.flight.requests import NoRequest

    endpoint = namespace_endpoint()
    if endpoint is None or "," in endpoint:
        raise click.UsageError(
            f"--endpoint {endpoint or 'is missing'}: expected a single proxy, like grpc://host:port"
        )

    async def act() -> None:
        calls = Endpoint(endpoint, patience_s=_PATIENCE_S, tls=namespace_tls())
        try:
            await planning.act(calls, action, NoRequest())
        finally:
            await calls.aclose()

    asyncio.run(act())


@proxy_group.command(
    "release", epilog="Example: dlog proxy release clicks --endpoint grpc://127.0.0.1:4190"
)
@click.argument("log")
@common_options
def release_log(log: str) -> None:
    """Make the proxy that owns LOG release it, so that a program with direct access can write.

    Records that the proxy has accepted become durable first.  The proxy owns LOG again as soon as a
    client writes to it.  The setting mode=direct of LOG excludes proxies permanently.
    """
    endpoint = namespace_endpoint()
    if endpoint is None:
        raise click.UsageError(
            "proxy release needs proxies: give --endpoint grpc://host:port, or DLOG_ENDPOINT"
        )
    work = _release(endpoint, log, patience_s=patience() / 2, tls=namespace_tls())
    if asyncio.run(in_time(work, endpoint)):
        show_done(f"log {log} is released", {"log": log, "released": True})
    else:
        show_done(f"log {log} is owned by no proxy", {"log": log, "released": False})


async def _serve(
    uri: str, config: ProxyConfig, tls: TlsFiles | None, client: LedgerClientConfig
) -> None:
    from dlcore.backends.direct.namespace import open_namespace
    from dlcore.proxy.server import ProxyServer

    async def open_as(client_id: str) -> DirectNamespace:
        return await open_namespace(
            uri,
            client_config=client,
            client_id=client_id,
            tls=tls,
            session_timeout_s=config.session_timeout_s,
        )

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with await ProxyServer.start(open_as, config) as server:
        click.echo(f"proxy serving on {server.location}")
        await stop.wait()


async def _release(endpoint: str, log: str, *, patience_s: float, tls: TlsFiles | None) -> bool:
    """Make the owner of a log release it; False if it has no owner.  Raises: LogNotFoundError."""
    from dlcore.backends.flight.endpoint import Endpoint
    from dlcore.backends.flight.planning import act
    from dlcore.flight import actions
    from dlcore.flight.requests import LogRequest

    request = LogRequest(log=log)
    async with Endpoint(endpoint, patience_s=patience_s, tls=tls) as calls:
        owner = await act(calls, actions.OWNER, request)
    if owner.log_id is None:
        raise LogNotFoundError(f"log {log!r} does not exist")
    async with Endpoint(owner.location or endpoint, patience_s=patience_s, tls=tls) as calls:
        return (await act(calls, actions.RELEASE, request)).released
