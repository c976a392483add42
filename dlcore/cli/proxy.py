"""`dlog proxy`: the process that serves logs to clients which speak Arrow Flight."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dlcore import kept_memory
from dlcore.cli.context import (
    client_config,
    common_options,
    namespace_tls,
    namespace_uri,
    settings_below,
)
from dlcore.proxy.config import ProxyConfig, proxy_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.config import LedgerClientConfig
    from dlcore.namespace import Namespace
    from dlcore.tls import TlsFiles

_SERVING = "serve_"
_Command = TypeVar("_Command", bound="Callable[..., Any]")


@click.group("proxy")
@common_options
def proxy_group() -> None:
    """Serve logs to clients which speak Arrow Flight."""


def _settings(command: _Command) -> _Command:
    for key, option in reversed(proxy_options().items()):
        # --tls-… are the files for bookies, of every command.
        flag = f"{_SERVING}{key}" if key.startswith("tls_") else key
        command = click.option(
            f"--{flag.replace('_', '-')}",
            type=option.kind,
            default=option.default,
            show_default=True,
            help=option.text,
        )(command)
    return command


@proxy_group.command("run", epilog="Example: dlog proxy run --port 4190")
@_settings
@common_options
def run_proxy(**options: object) -> None:
    """Run one proxy, until interrupted.

    Any number may run, also on one machine.  It prints where it serves once it does.  Logs go to
    standard error.  SIGINT (Ctrl-C) and SIGTERM stop it cleanly.

    Its settings may also stand in the table [proxy] of the configuration file, and in variables
    like DLOG_PROXY_PORT; those by which it talks to bookies in the table [ledger_client].
    """
    import uvloop

    context = click.get_current_context()
    by_hand = {
        key.removeprefix(_SERVING): value
        for key, value in options.items()
        if context.get_parameter_source(key) is not click.core.ParameterSource.DEFAULT
    }
    defaults = {key.removeprefix(_SERVING): value for key, value in options.items()}
    config = ProxyConfig(**(defaults | settings_below("proxy", proxy_options()) | by_hand))  # type: ignore[arg-type]
    client = client_config()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger().setLevel(config.log_level.upper())
    kept_memory.keep_what_is_freed()
    uvloop.run(_serve(namespace_uri(), config, namespace_tls(), client))


async def _serve(
    uri: str, config: ProxyConfig, tls: TlsFiles | None, client: LedgerClientConfig
) -> None:
    from dlcore.namespace import open_namespace
    from dlcore.proxy.server import ProxyServer

    async def open_as(client_id: str) -> Namespace:
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
