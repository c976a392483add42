"""`dlog log settings|retention`: the settings stored with a log, and its retention."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING

import click

from dlcore.base.clock import SystemClock
from dlcore.base.config import LogSettings
from dlcore.base.errors import CorruptMetadataError
from dlcore.ops.cli.context import (
    ask,
    common_options,
    confirmed,
    require_consent,
    run_async,
    run_direct,
)
from dlcore.ops.cli.output import bytes_text, show_done, show_fields
from dlcore.ops.cli.times import AGE_S, age_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.api.namespace import Namespace
    from dlcore.backends.direct.namespace import DirectNamespace

_ANY_TIER = "file:///tier"
_KEEPING = ("retention_s", "retention_bytes", "explicit_truncation")
"""The settings that decide when records are removed."""


@click.command("settings", epilog="Example: dlog log settings clicks --set compression=zstd")
@click.argument("log")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help=f"Change a setting; may be repeated.  KEY: {', '.join(LogSettings.__struct_fields__)}.",
)
@click.option("--unset", multiple=True, metavar="KEY", help="Leave a setting to the log's writers.")
@confirmed
@common_options
def show_settings(log: str, changes: tuple[str, ...], unset: tuple[str, ...], *, yes: bool) -> None:
    """Show and change the settings that are stored with LOG.

    Its writers apply them.  A change of retention_s or explicit_truncation asks for consent,
    because it may remove records.
    """
    wanted = dict.fromkeys(unset) | dict(setting_of(change) for change in changes)
    if not wanted:
        settings = _stored(log)
    else:
        # A wrong setting is refused before the user is asked.  A table may need the log's own tier.
        LogSettings(tier=_ANY_TIER if wanted.get("table") else None).changed(wanted)
        if not wanted.keys().isdisjoint(_KEEPING):
            require_consent(yes=yes)
        settings = _change(log, wanted, yes=yes)
    show_fields({name: getattr(settings, name) for name in LogSettings.__struct_fields__})


@click.command("reset-txid", epilog="Example: dlog log reset-txid clicks 0 --yes")
@click.argument("log")
@click.argument("txid", type=int)
@confirmed
@common_options
def reset_txids(log: str, txid: int, *, yes: bool) -> None:
    """Let transaction ids of LOG go on from TXID.

    The next record may then have any from there on.  Use this after a record with a far too high
    transaction id, which no other record can follow.  The log must hold no record: copy the records
    to keep to another log, then truncate this log to its end.  Readers that use transaction ids
    have to start again.
    """
    require_consent(yes=yes)
    ask(f"Let transaction ids of log {log} begin at {txid} again", yes=yes)

    async def reset(namespace: DirectNamespace) -> bool:
        from dlcore.log.writing.changing import reset_txid

        context = namespace.log_context
        return await reset_txid(context, await context.logs.find(log), txid)

    changed = run_direct(reset)
    fields = {"log": log, "txid": txid, "changed": changed}
    show_done(f"transaction ids of log {log} follow {txid}", fields)


def setting_of(text: str) -> tuple[str, object]:
    """Return the key and the value of ``KEY=VALUE``."""
    key, separator, value = text.partition("=")
    if not separator:
        raise click.UsageError(f"--set {text!r}: expected KEY=VALUE")
    try:
        return key, json.loads(value)  # numbers, true, false and null; anything else is text
    except ValueError:
        return key, value


@click.command("retention", epilog="Example: dlog log retention clicks 7d --yes")
@click.argument("log")
@click.argument("age", required=False, type=AGE_S)
@confirmed
@common_options
def set_retention(log: str, age: float | None, *, yes: bool) -> None:
    """Show how long LOG keeps its records, or set this to AGE.

    AGE is like 7d, 12h or 30m, or forever.  The next sweep of auto-recovery removes older records,
    in whole segments.  With the setting explicit_truncation it removes only truncated records, once
    they are older.
    """
    if age is None:
        settings = _stored(log)
    else:
        seconds = None if math.isinf(age) else age
        if seconds is not None:
            require_consent(yes=yes)
        settings = _change(log, {"retention_s": seconds}, yes=yes)
    kept = settings.retention_s
    if kept is None:
        what = "its records for ever"
    elif settings.explicit_truncation:
        what = f"all its records, and truncated ones until they are {age_text(kept)} old"
    else:
        what = f"its records for {age_text(kept)}"
    fields = {
        "log": log,
        "retention_s": kept,
        "explicit_truncation": settings.explicit_truncation,
    }
    show_done(f"log {log} keeps {what}", fields)


def _stored(log: str) -> LogSettings:
    async def read(namespace: Namespace) -> LogSettings:
        async with await namespace.open_log(log) as manager:
            return await manager.get_settings()

    return run_async(read)


def _change(log: str, changes: Mapping[str, object], *, yes: bool) -> LogSettings:
    """Change settings; ask for consent if this removes records that would have stayed.

    A wrong setting is refused before the user is asked.
    """
    describe = partial(_describe_going, log=log, changes=changes)
    going = run_async(describe)
    if going:
        require_consent(yes=yes)
        ask(going, yes=yes)

    async def change(namespace: Namespace) -> LogSettings:
        async with await namespace.open_log(log) as manager:
            return await manager.update_settings(**changes)

    return run_async(change)


def _bytes_kept(settings: LogSettings) -> float:
    return math.inf if settings.retention_bytes is None else settings.retention_bytes


async def _describe_going(namespace: Namespace, log: str, changes: Mapping[str, object]) -> str:
    from dlcore.log.upkeep.retention import readable_for_s, truncated_for_s

    async with await namespace.open_log(log) as manager:
        try:
            settings = await manager.get_settings()
        except CorruptMetadataError as error:
            LogSettings().changed(changes)
            return f"Replace the damaged settings of log {log} by the defaults and this: {error}"
        changed = settings.changed(changes)
        readable_s, truncated_s = readable_for_s(changed), truncated_for_s(changed)
        if readable_s < readable_for_s(settings):
            before_ms = SystemClock().now_ms() - int(readable_s * 1000)
            end = await manager.get_dlsn_not_less_than_timestamp(before_ms)
            count = await manager.get_log_record_count(None, end)
            return (
                f"Drop records of log {log} that are older than {age_text(readable_s)}: {count} "
                "are now"
            )
        if _bytes_kept(changed) < _bytes_kept(settings):
            kept = bytes_text(int(_bytes_kept(changed)))
            return f"Drop the oldest segments of log {log} while the newer ones have {kept}"
        if truncated_s < truncated_for_s(settings):
            which = f" that are older than {age_text(truncated_s)}" if truncated_s else ""
            return f"Drop the truncated records of log {log}{which}"
    return ""
