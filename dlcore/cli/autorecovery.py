"""`dlog autorecovery`: the service that makes lost replicas again, and what it is at."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dlcore.autorecovery.config import AutoRecoveryConfig
from dlcore.cli.context import (
    client_config,
    common_options,
    has_settings_file,
    namespace_tls,
    namespace_uri,
    run_async,
    settings_below,
    wants_json,
)
from dlcore.cli.output import show_done, show_fields, show_rows, time_text
from dlcore.log.upkeep.config import UpkeepConfig
from dlcore.reconfiguring import next_configuration
from dlcore.settings import Option, require_log_level

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from dlcore.autorecovery.maintenance import RecoveryStatus
    from dlcore.config import LedgerClientConfig
    from dlcore.namespace import Namespace
    from dlcore.tls import TlsFiles

_Command = TypeVar("_Command", bound="Callable[..., Any]")
_DEFAULTS = AutoRecoveryConfig()
_UPKEEP = UpkeepConfig()
_OF_UPKEEP = {
    "upkeep_interval_s": "poll_interval_s",
    "sweep_interval_s": "sweep_interval_s",
    "merged_grace_s": "merged_grace_s",
    "leftovers_age_s": "leftovers_age_s",
    "commits_age_s": "commits_age_s",
}
"""Settings that belong to the upkeep of logs, and their fields."""


@click.group("autorecovery")
@common_options
def autorecovery_group() -> None:
    """Make lost replicas again: run the service, look at it, pause it."""


def _number(
    flag: str, default: float, text: str, metavar: str = "NUMBER"
) -> Callable[[_Command], _Command]:
    return click.option(
        flag, type=type(default), default=default, show_default=True, metavar=metavar, help=text
    )


_seconds = partial(_number, metavar="SECONDS")


@autorecovery_group.command("run", epilog="Example: dlog autorecovery run")
@_seconds(
    "--lost-bookie-delay-s",
    _DEFAULTS.lost_bookie_delay_s,
    "How long a bookie that is not registered may stay away.",
)
@_seconds(
    "--open-ledger-grace-s",
    _DEFAULTS.open_ledger_grace_s,
    "How long a live writer may keep a lost bookie before its ledger is recovered.",
)
@_seconds("--audit-interval-s", _DEFAULTS.audit_interval_s, "From one audit to the next.")
@_seconds(
    "--check-interval-s", _DEFAULTS.check_interval_s, "From one full replica check to the next."
)
@_seconds("--poll-interval-s", _DEFAULTS.poll_interval_s, "How often a worker looks for work.")
@_seconds("--retry-pause-s", _DEFAULTS.retry_pause_s, "Before a failed repair is tried again.")
@_seconds("--retry-pause-s-max", _DEFAULTS.retry_pause_s_max, "The pause doubles, up to this.")
@_number("--check-ledgers-per-s", _DEFAULTS.check_ledgers_per_s, "Pace of the full replica check.")
@_number("--ledgers-at-once", _DEFAULTS.ledgers_at_once, "Ledgers repaired at the same time.")
@_number(
    "--copy-bytes-in-flight",
    _DEFAULTS.copy_bytes_in_flight,
    "Bytes of one ledger that are sent to its new place and not yet answered.",
    "BYTES",
)
@_seconds(
    "--upkeep-interval-s",
    _UPKEEP.poll_interval_s,
    "How often a worker looks for logs with small extents to merge.",
)
@_seconds(
    "--sweep-interval-s",
    _UPKEEP.sweep_interval_s,
    "How often is swept what dead processes, merging and deletions left.",
)
@_seconds(
    "--merged-grace-s",
    _UPKEEP.merged_grace_s,
    "How long the old ledgers of merged extents stay.",
)
@_seconds(
    "--leftovers-age-s",
    _UPKEEP.leftovers_age_s,
    "How old what a dead process staged must be to go.",
)
@_seconds(
    "--commits-age-s",
    _UPKEEP.commits_age_s,
    "How old the record of a commit must be to go: a replay that is older is not recognised.",
)
@_number(
    "--copy-bytes-per-s",
    _DEFAULTS.copy_bytes_per_s,
    "Pace of copying, of repairs; merging takes half of it.",
    "BYTES",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    metavar="LEVEL",
    help="What the log tells at least: debug, info, warning or error.",
)
@common_options
def run_service(**options: float | str) -> None:
    """Run a candidate for auditor and a worker, until interrupted.

    Any number may run; one of them audits, all repair.  They also keep logs up: small extents that
    streaming queries have written are merged, and what nobody needs any more is removed.  Logs go
    to standard error.  SIGINT (Ctrl-C) and SIGTERM stop it cleanly.

    Its settings may also stand in the table [autorecovery] of the configuration file, and in
    variables like DLOG_AUTORECOVERY_AUDIT_INTERVAL_S; those by which it talks to bookies in the
    table [ledger_client].  On SIGHUP the file is read again.
    """
    context = click.get_current_context()
    by_hand = {
        key: value
        for key, value in options.items()
        if context.get_parameter_source(key) is not click.core.ParameterSource.DEFAULT
    }

    def read() -> _ServiceConfig:
        below = settings_below("autorecovery", autorecovery_options())
        return _ServiceConfig.of(options | below | by_hand, client_config())

    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(_serve(namespace_uri(), namespace_tls(), read))


@dataclass(frozen=True, slots=True)
class _ServiceConfig:
    """What the service does, how it talks to bookies, and what it tells."""

    client: LedgerClientConfig
    recovery: AutoRecoveryConfig
    upkeep: UpkeepConfig
    log_level: str

    @classmethod
    def of(cls, settings: Mapping[str, Any], client: LedgerClientConfig) -> _ServiceConfig:
        """Return what the settings say, by key; `ConfigurationError` if one of them cannot be."""
        require_log_level(settings["log_level"])
        others = {*_OF_UPKEEP, "log_level"}
        recovery = AutoRecoveryConfig(**{k: v for k, v in settings.items() if k not in others})
        upkeep = UpkeepConfig(
            **{field: settings[key] for key, field in _OF_UPKEEP.items()},
            copy_bytes_per_s=recovery.copy_bytes_per_s / 2,
        )
        return cls(client, recovery, upkeep, log_level=settings["log_level"])


def autorecovery_options() -> dict[str, Option]:
    """Return the settings of the service by key, with what they mean."""
    return {
        each.name: Option(type(each.default), each.default, each.help or "", changes=True)
        for each in run_service.params
        if isinstance(each, click.Option) and each.expose_value and each.name
    }


async def _serve(uri: str, tls: TlsFiles | None, read: Callable[[], _ServiceConfig]) -> None:
    from dlcore.namespace import open_namespace

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
                    running.result()  # raises if it ended by a defect


@contextlib.asynccontextmanager
async def _started(
    namespace: Namespace, config: _ServiceConfig
) -> AsyncGenerator[asyncio.Task[None], None]:
    from dlcore.autorecovery.service import AutoRecovery

    service = AutoRecovery(
        namespace.recovery_context,
        config=config.recovery,
        owner=f"{socket.gethostname()}:{os.getpid()}",
        also=[namespace.upkeep(config.upkeep).run],
    )
    running = asyncio.get_running_loop().create_task(service.run())
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
    """Return the configuration to go on with, once it is another one; None: the end."""

    async def read_here() -> _ServiceConfig:
        return read()  # not in a thread: it asks click's context, which is this one's

    stopped = asyncio.create_task(stop.wait())
    changed = asyncio.create_task(next_configuration(hung_up, read_here, config))
    await asyncio.wait([running, stopped, changed], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    changed.cancel()
    await asyncio.wait([stopped, changed])
    return None if running.done() or stop.is_set() else changed.result()


@autorecovery_group.command("status", epilog="Example: dlog autorecovery status --json")
@common_options
def show_status() -> None:
    """Show who audits, whether it is paused, and which ledgers lack replicas, and why."""
    from dlcore.autorecovery.maintenance import Maintenance

    async def read(namespace: Namespace) -> RecoveryStatus:
        return await Maintenance(namespace.recovery_context).read_status()

    status = run_async(read)
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
    """Pause auto-recovery in all processes, or with --off let it go on.

    What is being copied is given up within moments; an audit and a check begin anew afterwards.
    """
    from dlcore.autorecovery.listing import RepairList

    async def write(namespace: Namespace) -> None:
        context = namespace.recovery_context
        repairs = RepairList(context.store, context.paths, context.clock)
        await repairs.set_paused(is_paused=not off)

    run_async(write)
    done = "goes on" if off else "is paused, until dlog autorecovery pause --off"
    show_done(f"auto-recovery {done}", {"paused": not off})
