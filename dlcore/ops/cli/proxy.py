"""`dlog proxy`: the process that serves logs to Arrow Flight clients."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dlcore.base import event_loop, server_process
from dlcore.base.background import side_tasks
from dlcore.base.errors import LogNotFoundError
from dlcore.base.log_lines import Process, log_to_stderr, set_log_level
from dlcore.base.server_process import next_configuration, tell_left
from dlcore.base.settings import config_of, values_of
from dlcore.ops.cli.context import (
    common_options,
    direct_arguments,
    has_settings_file,
    in_time,
    lists_names,
    log_format,
    namespace_endpoint,
    namespace_tls,
    namespace_uri,
    patience,
    program_settings,
    proxy_token,
    run_async,
    takes_settings,
)
from dlcore.ops.cli.output import show_done, show_rows, time_text
from dlcore.proxy.config import ProxyConfig, proxy_options

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from dlcore.api.namespace import Namespace
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.backends.flight.endpoint import Endpoint
    from dlcore.flight.actions import Action
    from dlcore.flight.answers import NoAnswer, ProxyHealth
    from dlcore.flight.requests import NoRequest
    from dlcore.ops.diagnosis.asking import Answer

_Result = TypeVar("_Result")
_PATIENCE_S = 10.0


@click.group("proxy")
@common_options
def proxy_group() -> None:
    """Serve logs to clients of Arrow Flight; manage proxies."""


@proxy_group.command("run", epilog="Example: dlog proxy run --port 4190")
@takes_settings(proxy_options())
@common_options
def run_proxy(**options: object) -> None:
    """Run one proxy, until interrupted.

    Any number may run, also on one machine.  It prints its location once it serves.  Logs go to
    standard error.  SIGINT (Ctrl-C) and SIGTERM stop it cleanly.

    Its settings may also be in the table [proxy] of the configuration file, and in variables like
    DLOG_PROXY_PORT.  Settings of its bookie client are in the table [ledger_client].  On SIGHUP the
    file is read again, and the level of the log changes.
    """

    def read() -> ProxyConfig:
        return config_of(ProxyConfig, program_settings("proxy", proxy_options(), options))

    config = read()
    from dlcore.base.server_process import report_oneself

    process = Process("proxy", config.name)
    report_oneself(process, values_of(config))
    log_to_stderr(process, log_format=log_format(), log_level=config.log_level)
    server_process.keep_what_is_freed()
    event_loop.run(_serve(namespace_uri(), config, direct_arguments(), read))


@proxy_group.command("list", epilog="Example: dlog proxy list --endpoint grpc://proxy-1:4190")
@lists_names
@common_options
def list_proxies() -> None:
    """List the live proxies: location, state, and owned logs.

    A drained proxy is not listed.  A proxy that was killed stays until its session ends.
    """
    endpoint, tls, token = namespace_endpoint(), namespace_tls(), proxy_token()

    async def read(namespace: Namespace) -> list[Answer[ProxyHealth]]:
        from dlcore.ops.diagnosis.asking import ask_proxies

        locations = await namespace.get_proxies()
        return await ask_proxies(locations, tls=tls, token=token, endpoint=endpoint)

    show_rows(
        list(map(_proxy_row, run_async(read))),
        columns=("location", "state", "logs", "problem"),
        empty="no proxy is live",
    )


def _proxy_row(answer: Answer[ProxyHealth]) -> dict[str, object]:
    from dlcore.ops.diagnosis.top import proxy_row

    report, row = answer.report, proxy_row(answer)
    expires_at_ms = None if report is None else report.expires_at_ms
    return {
        "location": row.proxy,
        "state": row.state,
        "logs": row.logs,
        "problem": row.problem or None,
        "expires": None if expires_at_ms is None else time_text(expires_at_ms),
        "ahead_ms": answer.ahead_ms,
    }


@proxy_group.command("drain", epilog="Example: dlog proxy drain --endpoint grpc://proxy-1:4190")
@common_options
def drain_proxy() -> None:
    """Make the proxy at --endpoint release all logs, and accept none.

    This lasts until it is undrained or ends.  The command ends once the proxy owns no log; clients
    are sent to the other proxies.  For load balancers the proxy is not ready from the beginning of
    the drain.
    """
    from dlcore.flight import actions

    _act(actions.DRAIN)
    endpoint = namespace_endpoint()
    show_done(f"{endpoint} takes no logs any more", {"drained": endpoint})


@proxy_group.command("undrain", epilog="Example: dlog proxy undrain --endpoint grpc://proxy-1:4190")
@common_options
def undrain_proxy() -> None:
    """Make the drained proxy at --endpoint accept logs again.

    It is ready then.
    """
    from dlcore.flight import actions

    _act(actions.UNDRAIN)
    endpoint = namespace_endpoint()
    show_done(f"{endpoint} takes logs again", {"undrained": endpoint})


def _act(action: Action[NoRequest, NoAnswer]) -> None:
    """Send an action to the one named proxy."""
    from dlcore.backends.flight import planning
    from dlcore.flight.requests import NoRequest

    endpoint = namespace_endpoint()
    if endpoint is None or "," in endpoint:
        raise click.UsageError(
            f"--endpoint {endpoint or 'is missing'}: expected a single proxy, like grpc://host:port"
        )

    _run_with(endpoint, lambda calls: planning.act(calls, action, NoRequest()))


def _run_with(endpoint: str, work: Callable[[Endpoint], Coroutine[Any, Any, _Result]]) -> _Result:
    """Run `work` with the proxies at an endpoint."""
    from dlcore.backends.flight.endpoint import Endpoint

    tls, token = namespace_tls(), proxy_token()

    async def run() -> _Result:
        async with Endpoint(endpoint, patience_s=_PATIENCE_S, tls=tls, token=token) as calls:
            return await work(calls)

    return asyncio.run(run())


@proxy_group.command(
    "release", epilog="Example: dlog proxy release clicks --endpoint grpc://127.0.0.1:4190"
)
@click.argument("log")
@common_options
def release_log(log: str) -> None:
    """Make the proxy that owns LOG release it.

    Then a program with direct access can write.  Records that the proxy has accepted become durable
    first.  The proxy owns LOG again as soon as a client writes to it.  The setting mode=direct of
    LOG excludes proxies permanently.
    """
    endpoint = namespace_endpoint()
    if endpoint is None:
        raise click.UsageError(
            "proxy release needs proxies: give --endpoint grpc://host:port, or DLOG_ENDPOINT"
        )
    # Two proxies may be asked in turn, each for half of the time.
    work = _release(endpoint, log, patience_s=patience() / 2)
    if asyncio.run(in_time(work, endpoint)):
        show_done(f"log {log} is released", {"log": log, "released": True})
    else:
        show_done(f"log {log} is owned by no proxy", {"log": log, "released": False})


async def _serve(
    uri: str,
    config: ProxyConfig,
    arguments: Mapping[str, Any],
    read: Callable[[], ProxyConfig],
) -> None:
    from dlcore.backends.direct.namespace import open_namespace
    from dlcore.proxy.server import ProxyServer

    async def open_as(client_id: str) -> DirectNamespace:
        return await open_namespace(
            uri, client_id=client_id, session_timeout_s=config.session_timeout_s, **arguments
        )

    loop = asyncio.get_running_loop()
    stop, hung_up = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, (hung_up if has_settings_file() else stop).set)
    async with await ProxyServer.start(open_as, config) as server, side_tasks() as tasks:
        server_process.freeze_what_is_here()
        click.echo(f"proxy serving on {server.location}")
        tasks.start(_follow(hung_up, read, config))
        await stop.wait()


async def _follow(
    hung_up: asyncio.Event, read: Callable[[], ProxyConfig], config: ProxyConfig
) -> None:
    """Read the configuration at each SIGHUP, and apply the level of the log."""

    async def read_here() -> ProxyConfig:
        return read()  # in this thread, which has click's context

    while True:
        config, left = config.changed_to(await next_configuration(hung_up, read_here, config))
        set_log_level(config.log_level)
        tell_left(left, values_of(config))


async def _release(endpoint: str, log: str, *, patience_s: float) -> bool:
    """Make the owner of a log release it; False if it has no owner.  Raises: LogNotFoundError."""
    from dlcore.backends.flight.endpoint import Endpoint, token_at
    from dlcore.backends.flight.planning import act
    from dlcore.flight import actions
    from dlcore.flight.requests import LogRequest

    request, tls, token = LogRequest(log=log), namespace_tls(), proxy_token()
    async with Endpoint(endpoint, patience_s=patience_s, tls=tls, token=token) as calls:
        owner = await act(calls, actions.OWNER, request)
    if owner.log_id is None:
        raise LogNotFoundError(f"log {log!r} does not exist")
    location = owner.location or endpoint
    own = token_at(location, token, endpoint=endpoint, tls=tls)
    async with Endpoint(location, patience_s=patience_s, tls=tls, token=own) as calls:
        return (await act(calls, actions.RELEASE, request)).released
