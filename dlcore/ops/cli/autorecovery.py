"""`dlog autorecovery`: the service that restores lost replicas, and its status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from dlcore.base.background import side_tasks
from dlcore.base.log_lines import Process, log_to_stderr, set_log_level
from dlcore.base.server_process import next_configuration
from dlcore.base.settings import Option, config_of, log_levels_of, options_of, values_of
from dlcore.ops.autorecovery.config import AutoRecoveryConfig, is_live
from dlcore.ops.cli.context import (
    client_config,
    common_options,
    has_settings_file,
    log_format,
    namespace_tls,
    namespace_uri,
    program_settings,
    run_direct,
    takes_settings,
    wants_json,
    zookeeper_access,
)
from dlcore.ops.cli.output import show_done, show_fields, show_rows, time_text
from dlcore.ops.upkeep.config import UpkeepConfig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.base.access.zookeeper import ZooKeeperAccess
    from dlcore.base.config import LedgerClientConfig
    from dlcore.ops.autorecovery.maintenance import RecoveryStatus


def autorecovery_options() -> dict[str, Option]:
    """Return the settings of the service by key, with their meaning."""
    level = Option(
        str,
        "info",
        "Lowest level of logged messages: debug, info, warning or error; levels of modules may "
        "follow, as in info,dlcore.ops=debug.",
    )
    found = options_of(AutoRecoveryConfig) | options_of(UpkeepConfig) | {"log_level": level}
    return {key: replace(option, changes=True, live=is_live(key)) for key, option in found.items()}


@click.group("autorecovery")
@common_options
def autorecovery_group() -> None:
    """Restore lost replicas: run, show or pause the service."""


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

    cluster: dict[str, object] = {}

    def read() -> _ServiceConfig:
        settings = program_settings("autorecovery", autorecovery_options(), options) | cluster
        return _ServiceConfig.of(settings, client_config())

    from dlcore.base.server_process import report_oneself

    config, process = read(), Process.here("autorecovery")
    report_oneself(process, values_of(config.recovery) | values_of(config.upkeep))
    log_to_stderr(process, log_format=log_format(), log_level=config.log_level)
    tls = namespace_tls()
    asyncio.run(_watched(tls, _serve(namespace_uri(), tls, zookeeper_access(), read, cluster)))


async def _watched(tls: TlsFiles | None, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and tell meanwhile when certificates expire."""
    async with side_tasks() as tasks:
        if tls is not None:
            from dlcore.base.access.tls_in_use import TlsInUse

            tasks.start(TlsInUse(tls).watch())
        await work


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
        log_levels_of(log_level)
        recovery = config_of(AutoRecoveryConfig, settings)
        return cls(client, recovery, config_of(UpkeepConfig, settings), log_level)


async def _serve(
    uri: str,
    tls: TlsFiles | None,
    zookeeper: ZooKeeperAccess,
    read: Callable[[], _ServiceConfig],
    cluster: dict[str, object],
) -> None:
    """Serve until stopped; `cluster` has the settings of the cluster, which `read` uses."""
    from dlcore.backends.direct.namespace import open_namespace
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.metadata.cluster_settings import ClusterSettingsStore
    from dlcore.ops.autorecovery.service import joined

    def use(settings: Mapping[str, object]) -> None:
        # A follower first reports settings that may be in use: only others wake the service.
        known = {key: value for key, value in settings.items() if is_live(key)}
        if known != cluster:
            cluster.clear()
            cluster.update(known)
            hung_up.set()

    in_use = TlsInUse.of(tls)
    loop = asyncio.get_running_loop()
    stop, hung_up = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, (hung_up if has_settings_file() else stop).set)
    config: _ServiceConfig | None = read()
    while config is not None:
        client = config.client
        async with (
            await open_namespace(
                uri, client_config=client, tls=tls, zookeeper=zookeeper
            ) as namespace,
            joined(namespace.ports, owner=_owner()),
            contextlib.AsyncExitStack() as steps,
        ):
            settings = ClusterSettingsStore(namespace.ports.store, namespace.ports.paths)
            steps.push_async_callback(settings.follow("autorecovery", use).aclose)
            # The namespace is opened anew only for another configuration of its client.
            while config is not None and config.client == client:
                set_log_level(config.log_level)
                async with _started(namespace, config, in_use) as running:
                    click.echo(f"auto-recovery of {namespace.uri} at work")
                    config = await _changed(running, stop, hung_up, read, config)
                if running.done():
                    running.result()  # raises if a defect ended it


@contextlib.asynccontextmanager
async def _started(
    namespace: DirectNamespace, config: _ServiceConfig, tls: TlsInUse | None
) -> AsyncGenerator[asyncio.Task[None], None]:
    from dlcore.base.listening.operator_port import operator_port
    from dlcore.ops.autorecovery.lagging import SubscriberLags
    from dlcore.ops.autorecovery.metrics import RecoveryFigures
    from dlcore.ops.autorecovery.service import AutoRecovery, operated_recovery
    from dlcore.ops.upkeep.worker import LogUpkeep

    recovery, figures = config.recovery, RecoveryFigures()
    lags = SubscriberLags(namespace, figures.audit, interval_s=recovery.lag_interval_s)
    upkeep = LogUpkeep.of(namespace, config.upkeep, figures)
    operated = operated_recovery(namespace, recovery, figures, tls)
    service = AutoRecovery(
        namespace.ports,
        config=recovery,
        owner=_owner(),
        also=[upkeep.run, lags.run],
        figures=figures,
        mend=upkeep.mend,
    )
    async with operator_port(recovery, operated, tls), side_tasks() as tasks:
        running = tasks.start(service.run())
        try:
            yield running
        finally:
            await service.aclose()
            # `wait` raises no error of the service: `_serve` takes it from the result.
            await asyncio.wait([running])


def _owner() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


async def _changed(
    running: asyncio.Task[None],
    stop: asyncio.Event,
    hung_up: asyncio.Event,
    read: Callable[[], _ServiceConfig],
    config: _ServiceConfig,
) -> _ServiceConfig | None:
    """Return the next configuration, once it is a different one; None: the service has ended."""

    from dlcore.base.listening.operator_port import require_free_port

    async def read_here() -> _ServiceConfig:
        # Not in another thread: it uses click's context, which belongs to this thread.
        found = read()
        await require_free_port(found.recovery, config.recovery)
        return found

    async with side_tasks() as tasks:
        stopped = tasks.start(stop.wait())
        changed = tasks.start(next_configuration(hung_up, read_here, config))
        await asyncio.wait([running, stopped, changed], return_when=asyncio.FIRST_COMPLETED)
    return None if running.done() or stop.is_set() else changed.result()


@autorecovery_group.command("status", epilog="Example: dlog autorecovery status --json")
@common_options
def show_status() -> None:
    """Show the auditor, and which ledgers lack replicas, and why.

    Also whether auto-recovery is paused.
    """
    from dlcore.ops.autorecovery.maintenance import Maintenance

    async def read(namespace: DirectNamespace) -> RecoveryStatus:
        return await Maintenance(namespace.ports).read_status()

    status = run_direct(read)
    last, scrub = status.last_check, status.scrub
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
        "left_out": status.left_out,
        "checked_ledgers": None if last is None else last.ledgers,
        "under_replicated": len(rows),
        "scrub_began": None if scrub is None else time_text(scrub.started_ms),
        "scrubbed_objects": None if scrub is None else scrub.objects,
        "scrub_bytes_left": None if scrub is None else scrub.left_bytes,
        "damaged_objects": None if scrub is None else scrub.damaged,
        "skipped_objects": None if scrub is None else scrub.skipped,
        "exported": None if status.export is None else time_text(status.export.exported_ms),
        "export": None if status.export is None else status.export.url,
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
