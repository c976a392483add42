"""`dlog sql`: logs as tables, for clients of Arrow Flight SQL."""

from __future__ import annotations

import signal
import ssl
import sys
import threading

import click

from dlcore.base.access.tls import TlsFiles, load_own
from dlcore.base.errors import ConfigurationError
from dlcore.base.http_options import address_of
from dlcore.ops.cli.console import host_and_port, require_loopback
from dlcore.ops.cli.context import common_options, namespace_endpoint, namespace_tls
from dlcore.ops.cli.output import show_done

_ADDRESS = "127.0.0.1:4185"
_MIB = 1024 * 1024


@click.command("sql", epilog="Example: dlog sql --endpoint grpc://127.0.0.1:4190")
@click.option(
    "--address", metavar="HOST:PORT", default=_ADDRESS, show_default=True, help="Where to serve."
)
@click.option("--serve-tls-cert", default="", metavar="FILE", help="Serve TLS with this (PEM).")
@click.option("--serve-tls-key", default="", metavar="FILE", help="Private key of it (PEM).")
@click.option(
    "--queries-max",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Most queries at once; each is a process.",
)
@click.option(
    "--memory-mib",
    type=click.IntRange(min=64),
    default=1024,
    show_default=True,
    help="Most memory of a query, beside that of its libraries.",
)
@click.option(
    "--query-s",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    help="Most seconds of a query, until its last row is taken.",
)
@common_options
def sql_command(
    address: str,
    serve_tls_cert: str,
    serve_tls_key: str,
    *,
    queries_max: int,
    memory_mib: int,
    query_s: int,
) -> None:
    """Serve logs as tables over Arrow Flight SQL.

    Clients read them through the proxies of --endpoint, each with the rights of its own token.
    Queries run in DuckDB, each in a process of its own.  It serves until it is interrupted
    (docs/flight-sql.md).
    """
    from importlib.metadata import version  # loads much

    import pyarrow as pa

    from dlcore.base.listening.listener import listening_error
    from dlcore.ops.sql.server import SqlServer

    sys.tracebacklimit = 0  # Flight sends the traceback of an error, with paths, to its client
    endpoint, tls = namespace_endpoint(), namespace_tls()
    if endpoint is None:
        raise ConfigurationError("dlog sql reads through proxies: give --endpoint")
    host, port = host_and_port(address, _ADDRESS)
    own = _own(host, serve_tls_cert, serve_tls_key)
    scheme = "grpc" if own is None else "grpc+tls"
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        server = SqlServer(
            f"{scheme}://{address_of(host, port)}",
            endpoint=endpoint,
            tls=tls,
            own=own,
            queries_max=queries_max,
            memory_bytes=memory_mib * _MIB,
            query_s=query_s,
            version=version("distributed-dlog"),
        )
    except (OSError, pa.ArrowException) as error:  # the latter for a port that is taken
        raise listening_error(f"address={address!r}", error) from error
    location = f"{scheme}://{address_of(host, server.port)}"
    show_done(f"SQL serving on {location}", {"location": location})
    stop.wait()
    server.stop()


def _own(host: str, cert: str, key: str) -> tuple[bytes, bytes] | None:
    if bool(cert) != bool(key):
        raise ConfigurationError("expected both --serve-tls-cert and --serve-tls-key, or neither")
    if not cert:
        require_loopback(host)
        return None
    # Arrow's server would refuse wrong ones without a reason.
    named = f"--serve-tls-cert={cert!r} --serve-tls-key={key!r}"
    load_own(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert=cert, key=key, named=named)
    content = TlsFiles(ca=cert, cert=cert, key=key).content()  # it asks for no certificates
    return content.cert, content.key
