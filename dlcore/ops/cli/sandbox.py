"""`dlog sandbox`: an embedded cluster in the foreground."""

from __future__ import annotations

import shlex
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlcore.base.errors import ConfigurationError, MetadataConnectionError
from dlcore.ops.cli.context import ROLE_KEY, common_options, log_format, wants_json
from dlcore.ops.cli.output import show_json

_POLL_S = 1.0

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from dlcore.ops.sandbox.cluster import AutoRecoveryProcess, Bookie, Proxy, Sandbox


@click.command(
    "sandbox", epilog="Example: dlog sandbox --bookies 4 --data-dir ./data --uri-file uri.txt"
)
@click.option(
    "--bookies", type=click.IntRange(min=1), default=3, show_default=True, help="Number of bookies."
)
@click.option(
    "--base-port",
    type=click.IntRange(min=1, max=65_000),
    metavar="P",
    help="The metadata server listens on P, bookies and then proxies on the ports after it; by "
    "default on free ports.",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the data here for restarts; by default in a temporary folder that is removed.",
)
@click.option(
    "--uri-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the namespace URI to this file when the cluster is ready; removed at the end.",
)
@click.option(
    "--rack",
    "racks",
    multiple=True,
    metavar="RACK",
    help="A rack for bookies; may be repeated: the bookies get the racks round-robin.",
)
@click.option(
    "--proxies",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of proxies that serve Arrow Flight.",
)
@click.option(
    "--autorecovery/--no-autorecovery",
    default=True,
    show_default=True,
    help="Whether to run a process that restores replicas of lost bookies.",
)
@click.option(
    "--secure",
    is_flag=True,
    help="Let only clients in that have a certificate; the command prints how to connect.",
)
@click.option(
    "--zookeeper",
    is_flag=True,
    help="Keep the metadata in a ZooKeeper from PySpark's jars, which needs Java.",
)
@click.option("--restart", is_flag=True, help="Start a process again when it ends by itself.")
@common_options
def sandbox_command(
    *,
    bookies: int,
    base_port: int | None,
    data_dir: Path | None,
    uri_file: Path | None,
    racks: tuple[str, ...],
    proxies: int,
    autorecovery: bool,
    secure: bool,
    zookeeper: bool,
    restart: bool,
) -> None:
    """Run a whole cluster on this machine, until interrupted.

    Metadata server, bookies, proxies and auto-recovery are processes of their own.  Print the
    namespace URI when all are ready.  SIGINT (Ctrl-C) and SIGTERM stop them cleanly.
    """
    from dlcore.ops.sandbox.cluster import Sandbox

    click.get_current_context().obj[ROLE_KEY] = "sandbox"
    logs = (f"--log-format={log_format()}",)
    if uri_file is not None:
        # A program that waits for the file must not find one of an earlier run.
        _remove(uri_file)
    with _stop_signals() as stopped:
        try:
            with Sandbox(
                bookies=bookies,
                base_port=base_port,
                data_dir=data_dir,
                racks=racks,
                proxies=proxies,
                autorecovery=autorecovery,
                secure=secure,
                zookeeper=zookeeper,
                bookie_options=logs,
                proxy_options=logs,
                autorecovery_options=logs,
            ) as sandbox:
                _announce(sandbox, uri_file)
                _watch(sandbox, stopped, restarts=restart)
        finally:
            if uri_file is not None:
                _remove(uri_file)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Turn SIGINT and SIGTERM into an event, so that they do not interrupt a start or a stop."""
    stopped = threading.Event()

    def stop(_: int, __: FrameType | None) -> None:
        stopped.set()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(sandbox: Sandbox, stopped: threading.Event, *, restarts: bool) -> None:
    """Wait for the end; report each process that ends by itself, and start it again if so asked."""
    running: list[Bookie | Proxy | AutoRecoveryProcess] = [*sandbox.bookies, *sandbox.proxies]
    if sandbox.autorecovery is not None:
        running.append(sandbox.autorecovery)
    while not stopped.wait(_POLL_S):
        server = sandbox.metadata_server
        if not server.is_running:
            raise MetadataConnectionError(f"{server.title} ended by itself; stopped the sandbox")
        ended = [each for each in running if not each.is_running]
        running = [each for each in running if restarts or each not in ended]
        for each in ended:
            if restarts:
                each.restart()
                continue
            click.echo(f"{each.name} ended; its output is in {each.log_path}", err=True)


def _announce(sandbox: Sandbox, uri_file: Path | None) -> None:
    if uri_file is not None:
        _write(uri_file, sandbox.uri)
    made, tls = sandbox.certificates, sandbox.tls
    if wants_json():
        show_json(
            {
                "uri": sandbox.uri,
                "bookies": [
                    {"name": bookie.name, "address": bookie.address, "pid": bookie.pid}
                    for bookie in sandbox.bookies
                ],
                "proxies": [
                    {"name": proxy.name, "location": proxy.location, "pid": proxy.pid}
                    for proxy in sandbox.proxies
                ],
                "autorecovery": sandbox.autorecovery.pid if sandbox.autorecovery else None,
                "tls": None if tls is None else {"ca": tls.ca, "cert": tls.cert, "key": tls.key},
                "config": None if made is None else str(made.configuration),
            }
        )
        return
    click.echo(sandbox.uri)
    for bookie in sandbox.bookies:
        click.echo(f"{bookie.name} on {bookie.address}, process {bookie.pid}")
    for proxy in sandbox.proxies:
        click.echo(f"{proxy.name} on {proxy.location}, process {proxy.pid}")
    if sandbox.autorecovery is not None:
        click.echo(f"auto-recovery, process {sandbox.autorecovery.pid}")
    if made is not None and tls is not None:
        click.echo(f"Python: tls=TlsFiles(ca={tls.ca!r}, cert={tls.cert!r}, key={tls.key!r})")
        click.echo(f"tokens of users: dlog secure token {made.folder} --user NAME")
        click.echo(f"Spark: tlsCa={tls.ca} tlsCert={tls.cert} tlsKey={tls.key}")
        variable = f"DLOG_CONFIG={shlex.quote(str(made.configuration))}"
    else:
        variable = f"DLOG_URI={sandbox.uri}"
    click.echo(f"export {variable}    # for dlog in another terminal; Ctrl-C stops")


def _write(path: Path, uri: str) -> None:
    # Renamed into place: a program that waits for the file finds it complete.
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(uri + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigurationError(f"uri-file={str(path)!r}: cannot write it: {error}") from error


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"uri-file={str(path)!r}: cannot remove it: {error}") from error
