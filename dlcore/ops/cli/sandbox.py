"""`dlog sandbox`: an embedded cluster in the foreground."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlcore.base.errors import ConfigurationError, MetadataConnectionError
from dlcore.ops.cli.context import ROLE_KEY, common_options, log_format, wants_json
from dlcore.ops.cli.output import show_json

_POLL_S = 1.0

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
    help="Write the namespace URI to this file when the cluster is ready; removed at the end.  "
    "The file is locked (flock) until then.",
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
    namespace URI when all are ready.  SIGINT (Ctrl-C), SIGTERM and the end of the terminal stop
    them cleanly.
    """
    from dlcore.ops.sandbox.cluster import Sandbox

    click.get_current_context().obj[ROLE_KEY] = "sandbox"
    logs = (f"--log-format={log_format()}",)
    with (
        # Outermost: a second signal must not end this process while it stops the others.
        _stop_signals() as stopping,
        _uri_file(uri_file) as write_uri,
        Sandbox(
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
            report=stopping.while_starting,
        ) as sandbox,
    ):
        stopping.has_started()
        write_uri(sandbox.uri)
        _announce(sandbox)
        _watch(sandbox, stopping.event, restarts=restart)


class _Stopping:
    """Signals that end the command: its event, or while the cluster starts, an exception.

    A start is given up between two of its steps, and not in one.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self._number = 0
        self._gives_up = True

    def receive(self, number: int, _: FrameType | None) -> None:
        """Take a signal."""
        self._number = number
        self.event.set()

    def while_starting(self, _: str) -> None:
        """Raise, once, if a signal came: a stop makes steps as well."""
        if not self.event.is_set() or not self._gives_up:
            return
        self._gives_up = False
        if self._number == signal.SIGINT:
            raise click.Abort
        raise SystemExit(128 + self._number)

    def has_started(self) -> None:
        """From now on signals only set the event."""
        self._gives_up = False


@contextmanager
def _stop_signals() -> Iterator[_Stopping]:
    """Take the signals that end the command; under nohup, which ignores SIGHUP, not that one."""
    stopping = _Stopping()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, stopping.receive) for number in numbers}
    try:
        yield stopping
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
            raise MetadataConnectionError(f"{server.name} ended by itself; stopped the sandbox")
        ended = [each for each in running if not each.is_running]
        running = [each for each in running if restarts or each not in ended]
        for each in ended:
            if restarts:
                each.restart()
                continue
            click.echo(f"{each.name} ended; its output is in {each.log_path}", err=True)


def _announce(sandbox: Sandbox) -> None:
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


@contextmanager
def _uri_file(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield what writes the URI to the file, which is removed after the block.

    Until then it is locked, so that no other sandbox takes it.
    """
    if path is None:
        yield lambda _: None
        return
    _take(path)
    from dlcore.base.whole_files import whole_file

    with ExitStack() as held:

        def write(uri: str) -> None:
            try:
                with whole_file(path, replaces=True) as file:
                    # The lock belongs to the open file, which this descriptor keeps open.
                    lock = os.dup(file.fileno())
                    held.callback(os.close, lock)
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.write(f"{uri}\n".encode())
            except OSError as error:
                raise _unusable(path, "write", error) from error
            held.callback(_remove, path)

        yield write


def _take(path: Path) -> None:
    """Remove a file of an earlier run, which a program that waits for the file must not find."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
    except FileNotFoundError:
        return
    except BlockingIOError:
        raise ConfigurationError(
            f"uri-file={str(path)!r} is that of a sandbox that runs: expected another file, or "
            "none that runs"
        ) from None
    except OSError as error:
        raise _unusable(path, "remove", error) from error


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(path, "remove", error) from error


def _unusable(path: Path, what: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"uri-file={str(path)!r}: cannot {what} it: {error}")
