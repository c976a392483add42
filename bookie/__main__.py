"""The bookie process: `python -m bookie --name bookie-1 --metadata-uri … --data-dir …`.

Exit status: 0 after SIGTERM, SIGINT or the end of `--watch-parent`'s stdin; 1 when the bookie
failed; 2 when it refused to start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from bookie.disks.port import DiskFullError
from bookie.server import BookieServer
from bookie.server_config import LEDGER_CLIENT, BookieConfig, bookie_options
from dlcore.base import event_loop, server_process
from dlcore.base.access.zookeeper import ZK_KEYS
from dlcore.base.background import BackgroundTasks, side_tasks
from dlcore.base.clock import SystemClock
from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import BookieStorageError, ConfigurationError, DLError
from dlcore.base.log_lines import Process, log_to_stderr, set_log_level
from dlcore.base.server_process import next_configuration, report_oneself, tell_left
from dlcore.base.settings import configuration_file, options_of, read_settings
from dlcore.metadata.paths import parse_uri
from dlcore.metadata.zookeeper import ZooKeeperStore

if TYPE_CHECKING:
    from collections.abc import Callable


class OutputError(DLError):
    """Standard output cannot be written."""


EXIT_STOPPED, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2

_EXAMPLE = """example:
  dlog bookie run --name bookie-1 --metadata-uri distributedlog://127.0.0.1:2181/dlog \\
      --data-dir /var/lib/dlog/bookie-1

The TOML file of --config, or of $DLOG_CONFIG, has the same keys with underscores in its table
[bookie]:
  [bookie]
  name = "bookie-1"
  garbage_interval_s = 60
Variables like DLOG_BOOKIE_GARBAGE_INTERVAL_S override it, options of the command line both.  The
namespace may also be in $DLOG_URI.  On SIGHUP the file is read again (docs/configuration.md)."""


def main(arguments: list[str] | None = None) -> int:
    """Run one bookie until it is stopped; return the exit status."""
    if sys.flags.optimize:
        return _refuse("python -O removes the checks that guard the data: start without it")
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    watch_parent = bool(options.pop("watch_parent"))
    if options.pop("help", False):
        try:
            _say(parser.format_help())
        except OutputError as error:
            sys.stderr.write(f"error: {error}\n")
            return EXIT_FAILED
        return EXIT_STOPPED
    try:
        config = _read_config(options)
        file = configuration_file(options["config"], os.environ)
    except ConfigurationError as error:
        return _refuse(str(error))
    process = Process("bookie", config.name)
    report_oneself(process, config.options)
    log_to_stderr(process, log_format=config.log_format, log_level=config.log_level)
    server_process.keep_what_is_freed()
    read_again = partial(_read_config, options) if file else None
    # uvloop, because an append crosses five event loops on its way to three bookies and back.
    return event_loop.run(_run(config, watch_parent=watch_parent, read_again=read_again))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlog bookie run",
        description="Run one bookie, a storage node of a cluster; `python -m bookie` is the same.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "-h",
        "--help",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show this message and exit",
    )
    parser.add_argument("--config", help="TOML file with options", metavar="FILE")
    parser.add_argument(
        "--watch-parent", action="store_true", help="stop when standard input reaches its end"
    )
    for key, option in bookie_options().items():
        default = "required" if option.default is None else f"default: {option.default!r}"
        names = [f"--{key.replace('_', '-')}"]
        if key == "metadata_uri":
            names.append("--uri")  # every other command calls it so
        parser.add_argument(
            *names,
            dest=key,
            metavar=option.kind.__name__.upper(),
            default=argparse.SUPPRESS,
            help=f"{option.text} [{default}]".replace("%", "%%"),
        )
    return parser


def _read_config(options: dict[str, object]) -> BookieConfig:
    file = None if options["config"] is None else str(options["config"])
    below = read_settings("bookie", bookie_options(), file=file, environment=os.environ)
    client = read_settings(
        "ledger_client",
        options_of(LedgerClientConfig, explained=False),
        file=file,
        environment=os.environ,
    )
    below |= {LEDGER_CLIENT + key: value for key, value in client.items()}
    # As of every command.
    common = {each: each for each in (*ZK_KEYS, "log_format")}
    for key, variable in {"metadata_uri": "uri", **common}.items():
        if f"DLOG_{variable.upper()}" in os.environ:
            below.setdefault(key, os.environ[f"DLOG_{variable.upper()}"])
    given = {key: value for key, value in options.items() if key != "config"}
    return BookieConfig.from_options({**below, **given})


async def _run(
    config: BookieConfig,
    *,
    watch_parent: bool,
    read_again: Callable[[], BookieConfig] | None = None,
) -> int:
    """Serve until stopped.

    Stopping cancels the serving task, which then shuts down in order.  For SIGHUP, `read_again`
    returns the configuration as it is now; with None, SIGHUP stops the bookie.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    if watch_parent:
        _call_at_end_of_stdin(loop, stop)
    hung_up = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, stop.set if read_again is None else hung_up.set)
    async with side_tasks() as tasks:
        serving = tasks.start(_serve(config, hung_up, read_again))
        stopping = tasks.start(stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    try:
        error = await serving
    except asyncio.CancelledError:
        return EXIT_STOPPED
    except ConfigurationError as refusal:
        return _refuse(str(refusal))
    except DLError as caught:
        error = caught
    sys.stderr.write(f"bookie {config.name} failed: {error}{_advice(error)}\n")
    return EXIT_FAILED


def _advice(error: DLError) -> str:
    if isinstance(error, DiskFullError):
        return "; to do: free space on the disk, and start the bookie again"
    if isinstance(error, BookieStorageError):
        return (
            "; to do: look for errors of the device in the kernel's log; a disk that failed, or "
            "has damaged data, is replaced as docs/replacing-a-disk.md says, and auto-recovery "
            "copies again what it held"
        )
    return ""


async def _serve(
    config: BookieConfig, hung_up: asyncio.Event, read_again: Callable[[], BookieConfig] | None
) -> DLError:
    """Serve until cancelled, or return why the bookie failed."""
    store = await ZooKeeperStore.connect(
        parse_uri(config.metadata_uri).servers,
        session_timeout_s=config.session_timeout_s,
        access=config.zookeeper,
    )
    try:
        async with await BookieServer.start(config, store=store, clock=SystemClock()) as server:
            server_process.collect_what_is_new()
            incarnation = server.bookie.incarnation
            _say(f"bookie {config.name} (incarnation {incarnation}) serving on {server.address}\n")
            following = BackgroundTasks()
            if read_again is not None:
                following.start(_follow(server, config, hung_up, read_again), name="configuration")
            try:
                return await server.wait_failed()
            finally:
                await following.aclose()
    finally:
        await store.aclose()


async def _follow(
    server: BookieServer,
    config: BookieConfig,
    hung_up: asyncio.Event,
    read_again: Callable[[], BookieConfig],
) -> None:
    """Read and apply the configuration at each SIGHUP."""
    read = partial(asyncio.to_thread, read_again)
    while True:
        config, left = config.changed_to(await next_configuration(hung_up, read, config))
        server.configure(config)
        set_log_level(config.log_level)
        tell_left(left, config.options)


def _call_at_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Set `stop` when the parent process, which holds the other end of the pipe, has ended."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _say(text: str) -> None:
    """Print to standard output; `OutputError` if that cannot be written."""
    if sys.stdout is None:  # it was closed before the start
        return
    encoding = sys.stdout.encoding or "utf-8"  # the encoding of a locale may lack letters
    text = text.encode(encoding, errors="backslashreplace").decode(encoding)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # For output that is flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"cannot write the output: {error.strerror}") from error


def _refuse(reason: str) -> int:
    sys.stderr.write(f"bookie refuses to start: {reason}\n")
    return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())
