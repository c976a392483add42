"""`dlog console`: the cluster in the browser."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
from typing import TYPE_CHECKING

import click

from dlcore.base.addresses import is_address
from dlcore.base.config import LogConfig
from dlcore.base.errors import ConfigurationError
from dlcore.base.http_options import address_of, is_loopback
from dlcore.ops.cli.context import (
    common_options,
    namespace_endpoint,
    namespace_tls,
    proxy_token,
    run_async,
    run_direct,
)
from dlcore.ops.cli.output import show_done

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from dlcore.api.namespace import Namespace
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ops.autorecovery.listing import RepairList

_ADDRESS = "127.0.0.1:4180"


@click.command("console", epilog="Example: dlog console --endpoint grpc://127.0.0.1:4190")
@click.option(
    "--address", metavar="HOST:PORT", default=_ADDRESS, show_default=True, help="Where to serve."
)
@click.option("--serve-tls-cert", default="", metavar="FILE", help="Serve HTTPS with this (PEM).")
@click.option("--serve-tls-key", default="", metavar="FILE", help="Private key of it (PEM).")
@click.option(
    "--allow-appends",
    is_flag=True,
    help="Let clients of HTTP append records, through the proxies of --endpoint (docs/http.md).",
)
@common_options
def console_command(
    address: str, serve_tls_cert: str, serve_tls_key: str, *, allow_appends: bool
) -> None:
    """Show the cluster and its logs in the browser.

    A page with bookies, proxies, logs, lags and tails is served until the command is interrupted.
    Open the address that it prints, which holds a secret: its holder can do what you can do.  With
    --endpoint that is what the token or certificate may do; directly it is everything.  Other
    machines are served only by HTTPS.  Programs read logs at the same address (docs/http.md).
    """
    host, port = host_and_port(address, _ADDRESS)
    tls, endpoint, token = namespace_tls(), namespace_endpoint(), proxy_token()
    if allow_appends and endpoint is None:
        raise ConfigurationError(
            "--allow-appends needs --endpoint: proxies know an append that is sent again"
        )
    context = _server_context(host, serve_tls_cert, serve_tls_key)

    async def serve(namespace: Namespace, repairs: RepairList | None = None) -> None:
        from dlcore.ops.cli.console.server import Console

        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        console = Console(
            namespace,
            endpoint=endpoint,
            tls=tls,
            token=token,
            appends=allow_appends,
            repairs=repairs,
        )
        async with await console.serve(host=host, port=port, tls=context) as server:
            scheme = "http" if context is None else "https"
            url = f"{scheme}://{address_of(host, server.port)}/#secret={console.secret}"
            show_done(f"console serving on {url}", {"url": url})
            await stop.wait()

    async def serve_all(namespace: DirectNamespace) -> None:
        from dlcore.ops.autorecovery.listing import RepairList

        ports = namespace.ports
        await serve(namespace, RepairList(ports.store, ports.paths, ports.clock))

    if endpoint is not None:
        run_async(serve, is_long=True)
    else:
        # A user that clicks must not wait for a writer's lock.
        run_direct(serve_all, is_long=True, config=LogConfig(lock_timeout_s=0))


def host_and_port(address: str, example: str) -> tuple[str, int]:
    """Return the host and port of an address to serve at.  Raises: ConfigurationError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not is_address(host, port):
        raise ConfigurationError(f"address={address!r}: expected HOST:PORT, like {example}")
    return host, int(port)


def require_loopback(host: str, *, advice: str = "") -> None:
    """Require, of a server without TLS, that only this machine reaches it.

    Raises:
        ConfigurationError: others do; `advice` is the end of its text.
    """
    if not is_loopback(host):
        raise ConfigurationError(
            f"host={host!r}: what others can reach needs --serve-tls-cert and --serve-tls-key"
            f"{advice}"
        )


def _is_any(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return False


def _server_context(host: str, cert: str, key: str) -> Callable[[], ssl.SSLContext] | None:
    if _is_any(host):
        raise ConfigurationError(
            f"host={host!r}: expected the one name or address by which browsers open the console"
        )
    if not cert and not key:
        require_loopback(host, advice="; or serve on 127.0.0.1, and forward the port with ssh -L")
        return None
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.access.tls_in_use import TlsInUse

    in_use = TlsInUse(TlsFiles(ca=cert, cert=cert, key=key))  # it asks for no certificates
    return lambda: in_use.server_context(asks_clients=False)
