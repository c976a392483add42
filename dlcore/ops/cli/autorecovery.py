"""`dlog autorecovery`: the service that restores lost replicas, and its status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from dlcore.base.background import side_tasks
from dlcore.base.reconfiguring import next_configuration
from dlcore.base.seldom import log_to_stderr
from dlcore.base.settings import Option, config_of, options_of, require_log_level
from dlcore.ops.autorecovery.config import AutoRecoveryConfig
from dlcore.ops.cli.context import (
    client_config,
    common_options,
    has_settings_file,
    namespace_tls,
    namespace_uri,
    program_settings,
    run_direct,
    takes_settings,
    wants_json,
)
from dlcore.ops.cli.output import show_done, show_fields, show_rows, time_text
from dlcore.ops.upkeep.config import UpkeepConfig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.config import LedgerClientConfig
    from dlcore.base.tls import TlsFiles
    from dlcore.ops.autorecovery.maintenance import RecoveryStatus


def autorecovery_options() -> dict[str, Option]:
    """Return the settings of the service by key, with their meaning."""
    level = Option(str, "info", "What the log tells at least: debug, info, warning or error.")
    found = options_of(AutoRecoveryConfig) | options_of(UpkeepConfig) | {"log_level": level}
    return {key: replace(option, changes=True) for key, option in found.items()}


@click.group("autorecovery")
@common_options
def autorecovery_group() -> None:
    """Restore lost replicas: run the service, show its status, pause it."""


@autorecovery_group.command("run", epilog="Example: dlog autorecovery run")
@takes_settings(autorecovery_options())
@common_options
def run_service(**options: object) -> None:
    """Run a candidate for auditor and a worker, until interrupted.

    Any number may run; one of them audits, all repair.  They also do upkeep: they merge small
    extents of streaming queries, and remove records and staged ledgers that are not needed any
    more.  Logs go to standard error.  SIGINT (Ctrl-C) and SIGTERM stop it cleanly.

    Its settings may also be in the table [autorecovery] of the configuration file, and in variables
    like DLOG_AUTORECOVERY_AUDIT_INTERVAL_S.  Settings of its bookie client are in the table
    [ledger_client].  On SIGHUP the file is read again.
    """

    def read() -> _ServiceConfig:
        settings = program_settings("autorecovery", autorecovery_options(), options)
        return _ServiceConfig.of(settings, client_config())

    log_to_stderr()
    asyncio.run(_serve(namespace_uri(), namespace_tls(), read))


@dataclass(frozen=True, slots=True)
class _ServiceConfig:
    """The settings of the service, of its bookie client, and of its log."""

    client: LedgerClientConfig
    recovery: AutoRecoveryConfig
    upkeep: UpkeepConfig
    log_level: str

    @classmethod
    def of(cls, settings: Mapping[str, Any], client: LedgerClientConfig) -> _ServiceConfig:
        """Return the settings by key, checked; raises `ConfigurationError` for a wrong value."""
        log_level = settings.get("log_level", "info")
        require_log_level(log_level)
        recovery = config_of(AutoRecoveryConfig, settings)
        return cls(client, recovery, config_of(UpkeepConfig, settings), log_level)


async def _serve(uri: str, tls: TlsFiles | None, read: Callable[[], _ServiceConfig]) -> None:
    from dlcore.backends.direct.namespace import open_namespace

    loop = asyncio.get_running_loop()
    stop, hung_up = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, (hung_up if has_settings_file() else stop).set)
    config: _ServiceConfig | None = read()
    while config is not None:
        client = config.client
        async with await open_namespace(uri, client_config=client, tls=tls) as namespace:
            while config is not None and config.client == client:
                logging.getLogger().setLevel(config.log_level.upper())
                async with _started(namespace, config) as running:
                    click.echo(f"auto-recovery of {namespace.uri} at work")
                    config = await _changed(running, stop, hung_up, read, config)
                if running.done():
                    running.result()  # raises if a defect ended it


@contextlib.asynccontextmanager
async def _started(
    namespace: DirectNamespace, config: _ServiceConfig
) -> AsyncGenerator[asyncio.Task[None], None]:
    from dlcore.ops.autorecovery.service import AutoRecovery
    from dlcore.ops.upkeep.worker import LogUpkeep

    service = AutoRecovery(
        namespace.ports,
        config=config.recovery,
        owner=f"{socket.gethostname()}:{os.getpid()}",
        also=[LogUpkeep.of(namespace, config.upkeep).run],
    )
    async with side_tasks() as tasks:
        running = tasks.start(service.run())
        try:
            yield running
        finally:
            await service.aclose()
            await asyncio.wait([running])


async def _changed(
    running: asyncio.Task[None],
    stop: asyncio.Event,
    hung_up: asyncio.Event,
    read: Callable[[], _ServiceConfig],
    config: _ServiceConfig,
) -> _ServiceConfig | None:
    """Return the next configuration, once it is a different one; None: the service has ended."""

    async def read_here() -> _ServiceConfig:
        # Not in another thread: it uses click's context, which belongs to this thread.
        return read()

    async with side_tasks() as tasks:
        stopped = tasks.start(stop.wait())
        changed = tasks.start(next_configuration(hung_up, read_here, config))
        await asyncio.wait([running, stopped, changed], return_when=asyncio.FIRST_COMPLETED)
    return None if running.done() or stop.is_set() else changed.result()


@autorecovery_group.command("status", epilog="Example: dlog autorecovery status --json")
@common_options
def show_status() -> None:
    """Show the auditor, whether it is paused, and the ledgers that lack replicas, and why."""
    from dlcore.ops.autorecovery.maintenance import Maintenance

    async def read(namespace: DirectNamespace) -> RecoveryStatus:
        return await Maintenance(namespace.ports).read_status()

    status = run_direct(read)
    last = status.last_check
    rows = [
        {
            "ledger": each.ledger_id,
            "since": time_text(each.since_ms),
            "missing": [str(bookie) for bookie in each.missing],
            "attempts": each.attempts,
            "reason": each.reason or None,
        }
        for each in status.ledgers
    ]
    fields: dict[str, object] = {
        "auditor": None if status.auditor is None else status.auditor.owner,
        "paused": status.is_paused,
        "last_check": None if last is None else time_text(last.finished_ms),
        "left_out": [text for each in status.troubles for text in each.found],
        "checked_ledgers": None if last is None else last.ledgers,
        "under_replicated": len(rows),
    }
    if wants_json():
        show_fields(fields | {"ledgers": rows})
        return
    show_fields(fields)
    if rows:
        show_rows(rows, columns=("ledger", "since", "missing", "attempts", "reason"), empty="")


@autorecovery_group.command("pause", epilog="Example: dlog autorecovery pause --off")
@click.option("--off", is_flag=True, help="Let it go on.")
@common_options
def pause(*, off: bool) -> None:
    """Pause auto-recovery in all processes, or with --off resume it.

    Copying stops within moments.  After the pause, an audit and a check begin again.
    """
    from dlcore.ops.autorecovery.listing import RepairList

    async def write(namespace: DirectNamespace) -> None:
        context = namespace.ports
        repairs = RepairList(context.store, context.paths, context.clock)
        await repairs.set_paused(is_paused=not off)

    run_direct(write)
    done = "goes on" if off else "is paused, until dlog autorecovery pause --off"
    show_done(f"auto-recovery {done}", {"paused": not off})
