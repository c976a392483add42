"""`dlog log`: create, list, show, delete, truncate, seal, fork and count logs; find positions.

Other commands of logs are in the modules beside this one.  `writing` and `reading` write and read
records.  `inspecting` shows problems and sizes of logs.  `keeping` shows and changes their settings
and retention.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from dlcore.base.clock import SystemClock
from dlcore.base.config import LogConfig, QuorumConfig
from dlcore.base.errors import (
    ConfigurationError,
    CorruptMetadataError,
    LogExistsError,
    LogNotFoundError,
    UnexpectedError,
    UnsupportedError,
)
from dlcore.base.ids import DLSN, validate_log_name
from dlcore.base.records import NotLessThan, RecordField
from dlcore.ops.cli.bulk import cat_log, copy_records, purge_log
from dlcore.ops.cli.context import (
    ask,
    common_options,
    confirmed,
    lists_names,
    namespace_uri,
    patience,
    require_consent,
    run_async,
    run_direct,
    wants_json,
)
from dlcore.ops.cli.inspecting import inspect_logs, repair_log, show_lag, show_space, watch_log
from dlcore.ops.cli.keeping import reset_txids, set_retention, show_settings
from dlcore.ops.cli.output import (
    bytes_text,
    show_done,
    show_fields,
    show_rows,
    telling_time,
    time_text,
)
from dlcore.ops.cli.reading import dump_log, tail_log
from dlcore.ops.cli.redaction import redact_log
from dlcore.ops.cli.tables import show_table, table_of, table_text
from dlcore.ops.cli.times import EpochMs
from dlcore.ops.cli.writing import write_log

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore.api.log import DistributedLogManager
    from dlcore.api.namespace import Namespace
    from dlcore.backends.direct.namespace import DirectNamespace


@click.command("fork", epilog="Example: dlog log fork clicks --at 3:17:0 clicks-test")
@click.argument("log")
@click.argument("new_name")
@click.option(
    "--at",
    metavar="DLSN",
    help="The fork has the records before this position [all that is in objects].",
)
@common_options
def fork_log(log: str, new_name: str, at: str | None) -> None:
    """Begin a log NEW_NAME with the cold records of LOG.

    Nothing is copied.  Positions, transaction ids and sequence ids are those of LOG, and the fork
    is written on from there.  Each of the two logs is truncated and deleted without the other one.
    """
    cut = None if at is None else DLSN.parse(at)

    async def fork(namespace: Namespace) -> tuple[DLSN, int]:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        end = await namespace.fork_log(log, new_name, at=cut)
        return end, round((loop.time() - start_s) * 1000)

    end, took_ms = run_async(fork)
    show_done(
        f"forked log {log} at {end} to {new_name}, in {took_ms} ms",
        {"log": new_name, "source": log, "at": str(end), "took_ms": took_ms},
    )


@click.group("log")
@common_options
def log_group() -> None:
    """Create, write, read, truncate, inspect and delete logs."""


for command in (
    write_log, tail_log, cat_log, dump_log, copy_records, purge_log,
    inspect_logs, repair_log, show_space, show_lag, watch_log, show_settings, set_retention,
    reset_txids, fork_log, show_table, redact_log,
):  # fmt: skip
    log_group.add_command(command)


@log_group.command("create", epilog="Example: dlog log create trips --schema 'city string'")
@click.argument("log")
@click.option(
    "--replication-factor",
    type=click.IntRange(min=1),
    metavar="N",
    help="Store every entry on N bookies, and wait for all N; instead of the three quorum options.",
)
@click.option("--ensemble", type=click.IntRange(min=1), metavar="E", help="Bookies per ledger [3].")
@click.option(
    "--write-quorum", type=click.IntRange(min=1), metavar="QW", help="Copies of an entry [3]."
)
@click.option(
    "--ack-quorum", type=click.IntRange(min=1), metavar="QA", help="Copies before an ack [2]."
)
@click.option(
    "--schema",
    "schema_text",
    metavar="COLUMNS",
    help="Create a typed log with columns like 'city string, fare double'; types are Arrow's.",
)
@click.option(
    "--schema-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the columns from a file with such text, or from an Arrow or Parquet file.",
)
@click.option("--if-missing", is_flag=True, help="Do nothing if LOG exists.")
@common_options
def create_log(
    log: str,
    *,
    replication_factor: int | None,
    ensemble: int | None,
    write_quorum: int | None,
    ack_quorum: int | None,
    schema_text: str | None,
    schema_file: Path | None,
    if_missing: bool,
) -> None:
    """Create LOG, a byte log, or a typed log with --schema.

    The schema may also be in a file (--schema-file).  Acknowledged records survive the loss of
    QA - 1 bookies.
    """
    sizes = (replication_factor, ensemble, write_quorum, ack_quorum)
    schema, config = _schema(schema_text, schema_file), None
    if any(size is not None for size in sizes):  # otherwise they are those of the back end
        config = LogConfig(quorum=_quorum(*sizes))
    name = validate_log_name(log)

    async def create(namespace: Namespace) -> str | None:
        await namespace.create_log(name, config=config, schema=schema)
        async with await namespace.open_log(name) as manager:
            quorum = (await manager.status()).quorum
            return None if quorum is None else str(quorum)

    try:
        quorum = run_async(create)
    except LogExistsError:
        if not if_missing:
            raise
        show_done(f"log {name} is there already", {"log": name, "created": False})
        return
    if quorum is None:  # proxies do not tell theirs
        show_done(f"created log {name}", {"log": name})
    else:
        show_done(f"created log {name} (E/Qw/Qa {quorum})", {"log": name, "quorum": quorum})


def _schema(text: str | None, file: Path | None) -> pa.Schema | None:
    if text is not None and file is not None:
        raise click.UsageError("give one of --schema and --schema-file, not both")
    from dlcore.api.schemas import schema_from_bytes, schema_from_text

    if text is not None:
        return schema_from_text(text)
    return None if file is None else schema_from_bytes(file.read_bytes())


def _quorum(
    replication_factor: int | None,
    ensemble: int | None,
    write_quorum: int | None,
    ack_quorum: int | None,
) -> QuorumConfig:
    given = [size for size in (ensemble, write_quorum, ack_quorum) if size is not None]
    if replication_factor is not None:
        if given:
            raise click.UsageError(
                "--replication-factor N stands for --ensemble N --write-quorum N --ack-quorum N; "
                "give one or the other"
            )
        return QuorumConfig.of_replication_factor(replication_factor)
    default = QuorumConfig()
    # Missing values follow from given ones: --ensemble 4 keeps three copies, --ensemble 2 has two.
    ensemble_size = ensemble or max(default.ensemble_size, write_quorum or 0)
    write_quorum_size = write_quorum or min(default.write_quorum_size, ensemble_size)
    ack_quorum_size = ack_quorum or min(default.ack_quorum_size, write_quorum_size)
    return QuorumConfig(
        ensemble_size=ensemble_size,
        write_quorum_size=write_quorum_size,
        ack_quorum_size=ack_quorum_size,
    )


@log_group.command("list", epilog="Example: dlog log list -q orders/ | xargs -n 1 dlog log show")
@click.argument("prefix", required=False)
@lists_names
@common_options
def list_logs(prefix: str | None) -> None:
    """List the logs, or those whose names start with PREFIX."""
    names = run_async(lambda namespace: namespace.get_logs(prefix))
    show_rows([{"log": name} for name in names], columns=("log",), empty="no logs")


@log_group.command("show", epilog="Example: dlog log show clicks --json")
@click.argument("log")
@common_options
def show_log(log: str) -> None:
    """Show one log: first and last record, size, writer, table.

    Also how many replicas are missing.
    """

    async def read(namespace: Namespace) -> tuple[dict[str, object], dict[str, object] | None]:
        async with await namespace.open_log(log) as manager:
            return await _fields_of(manager), await _table(namespace, manager)

    fields, table = run_async(read)
    show_fields(fields | {"table": table if wants_json() else table_text(table)})


async def _table(namespace: Namespace, log: DistributedLogManager) -> dict[str, object] | None:
    try:
        namespace_uri()
    except UnsupportedError as error:
        table_format = (await log.get_settings()).table
        return None if table_format is None else {"format": table_format, "error": str(error)}
    # Less than the limit of the command: a store that hangs must not cost the other fields.
    return await table_of(cast("DirectNamespace", namespace), log, limit_s=patience() / 2)


async def _fields_of(log: DistributedLogManager) -> dict[str, object]:
    status, schema = await log.status(), await log.get_schema()
    from dlcore.api.schemas import describe_schema

    fields: dict[str, object] = {
        "log": status.name,
        "schema": None if schema is None else describe_schema(schema),
        "segments": status.segment_count,
        "records": status.record_count,
        "bytes": status.size_bytes,
        "sealed": status.sealed,
        "created": status.created_ms and time_text(status.created_ms),
        "forked_from": status.forked_from,
        "first_dlsn": None if status.first is None else str(status.first),
        "last_dlsn": None if status.last is None else str(status.last),
        "last_txid": status.last_txid,
        "idle_s": status.idle_s,
        "quorum": str(status.quorum),
        "ledgers": status.ledger_count,
        "under_replicated": status.under_replicated_ledgers,
        "writer": status.writer,
    }
    if status.created_ms is None:  # proxies do not know what only ZooKeeper has
        for name in ("created", "forked_from", "quorum", "ledgers", "under_replicated", "writer"):
            del fields[name]
    return fields


@log_group.command("count", epilog="Example: dlog log count clicks 1:0:0 3:17:0")
@click.argument("log")
@click.argument("start", required=False, metavar="[START]")
@click.argument("end", required=False, metavar="[END]")
@common_options
def count_records(log: str, start: str | None, end: str | None) -> None:
    """Print how many records LOG holds, without truncated ones.

    Or the number of records from position START on, up to but not including END.
    """
    first = None if start is None else DLSN.parse(start)
    last = None if end is None else DLSN.parse(end)

    count = run_async(lambda namespace: _count(namespace, log, first, last))
    show_done(str(count), {"log": log, "records": count})


async def _count(namespace: Namespace, log: str, start: DLSN | None, end: DLSN | None) -> int:
    async with await namespace.open_log(log) as manager:
        return await manager.get_log_record_count(start, end)


@log_group.command("position", epilog="Example: dlog log position clicks --timestamp 2026-01-31")
@click.argument("log")
@click.option("--txid", type=int, metavar="TXID", help="The first record with TXID or more.")
@click.option(
    "--timestamp",
    "timestamp_ms",
    type=EpochMs(SystemClock().now_ms),
    metavar="TIME",
    help="The first record written at TIME or later: 2026-01-31T12:00:00Z, -1h (an hour ago), or "
    "epoch milliseconds.",
)
@common_options
def find_position(log: str, txid: int | None, timestamp_ms: int | None) -> None:
    """Print a record's position by its transaction id or time.

    If no record is so late, print the end of the log, which is the position of the next record.
    """
    if (txid is None) == (timestamp_ms is None):
        raise click.UsageError("give one of --txid and --timestamp, not both")

    wanted = NotLessThan(
        RecordField.TXID if txid is not None else RecordField.TIMESTAMP_MS,
        max(0, txid if txid is not None else timestamp_ms or 0),
    )

    async def find(namespace: Namespace) -> tuple[DLSN, DLSN]:
        async with await namespace.open_log(log) as manager:
            place = await manager.find_place(wanted)
            return place.dlsn, (await manager.get_snapshot()).end

    position, end = run_async(find)
    fields = {"log": log, "dlsn": str(position), "is_end": position >= end}
    show_done(str(position), fields)


@log_group.command("truncate", epilog="Example: dlog log truncate clicks 3:17:0 --yes")
@click.argument("log")
@click.argument("dlsn", required=False)
@click.option("--read", "is_read", is_flag=True, help="Truncate what all subscribers have read.")
@confirmed
@common_options
def truncate_log(log: str, dlsn: str | None, *, is_read: bool, yes: bool) -> None:
    """Truncate LOG before position DLSN, permanently.

    A position beyond the end is refused; the end itself truncates all records.  With --read, what
    any subscriber has not read stays, Spark queries among them.
    """
    if (dlsn is None) != is_read:
        given = "none is given" if dlsn is None else f"{dlsn} and --read are both given"
        raise ConfigurationError(f"expected a DLSN or --read: {given}")
    position = DLSN.INITIAL if dlsn is None else DLSN.parse(dlsn)
    require_consent(yes=yes)
    if is_read:
        position = run_async(lambda namespace: _read_by_all(namespace, log))

    counted = run_async(lambda namespace: _count(namespace, log, None, position))
    ask(f"Drop the {counted} records of log {log} before {position}", yes=yes)

    async def truncate(namespace: Namespace) -> bool:
        async with await namespace.open_log(log) as manager:
            return await manager.truncate(position)

    changed = run_async(telling_time("truncating", truncate), is_long=True)
    fields = {"log": log, "dlsn": str(position), "changed": changed}
    if changed:
        show_done(f"truncated log {log} before {position}", fields)
    else:
        show_done(f"log {log} has nothing before {position}", fields)


async def _read_by_all(namespace: Namespace, log: str) -> DLSN:
    async with await namespace.open_log(log) as manager:
        found = await manager.get_subscriptions()
    if not found:
        raise ConfigurationError(
            f"log {log!r} has no subscribers: name the DLSN to truncate before"
        )
    return min(found.values())


@log_group.command("seal", epilog="Example: dlog log seal clicks --yes")
@click.argument("log")
@confirmed
@common_options
def seal_log(log: str, *, yes: bool) -> None:
    """Mark the end of LOG: no record can ever follow.

    Readers learn that it has ended.  The segment of a dead writer is recovered first.  If a live
    writer owns the log, the command fails.  A proxy that owns it and is asked with --endpoint, or
    through another proxy, releases it.
    """
    require_consent(yes=yes)
    ask(f"Seal log {log}: nothing can be written to it afterwards", yes=yes)

    async def seal(namespace: Namespace) -> None:
        async with await namespace.open_log(log) as manager:
            await manager.mark_end_of_stream()

    # The user must not wait for a writer's lock.
    run_async(seal, config=LogConfig(lock_timeout_s=0))
    show_done(f"sealed log {log}", {"log": log})


@log_group.command("rename", epilog="Example: dlog log rename clicks old/clicks")
@click.argument("log")
@click.argument("new_name")
@common_options
def rename_log(log: str, new_name: str) -> None:
    """Give LOG another name, at once for all clients.

    This is refused while a writer owns it.  Clients that have it open continue.  A Spark query
    finds the log by its name: start it again with the new name.  Its last batch is recognized by
    the log's id, and is not written again.
    """
    run_async(lambda namespace: namespace.rename_log(log, new_name))
    show_done(f"renamed log {log} to {new_name}", {"log": new_name, "old_name": log})


@log_group.command("schema", epilog="Example: dlog log schema trips")
@click.argument("log")
@common_options
def show_schema(log: str) -> None:
    """Show the columns of the typed log LOG, and their types."""

    async def read(namespace: Namespace) -> pa.Schema | None:
        async with await namespace.open_log(log) as manager:
            return await manager.get_schema()

    schema = run_async(read)
    rows = [
        {"column": field.name, "type": f"{field.type}{'' if field.nullable else ' not null'}"}
        for field in schema or ()
    ]
    show_rows(rows, columns=("column", "type"), empty=f"log {log} is one of bytes")


@log_group.command("subscriptions", epilog="Example: dlog log subscriptions clicks --json")
@click.argument("log")
@click.option("--delete", "subscriber", metavar="NAME", help="Delete the position of NAME.")
@confirmed
@common_options
def show_subscriptions(log: str, subscriber: str | None, *, yes: bool) -> None:
    """Show the stored positions of subscribers, or delete one."""
    if subscriber is not None:
        require_consent(yes=yes)

    async def read(namespace: Namespace) -> dict[str, DLSN]:
        async with await namespace.open_log(log) as manager:
            return await manager.get_subscriptions()

    found = run_async(read)
    if subscriber is None:
        rows = [{"subscriber": name, "dlsn": str(dlsn)} for name, dlsn in sorted(found.items())]
        show_rows(rows, columns=("subscriber", "dlsn"), empty=f"log {log} has no subscribers")
        return
    if subscriber not in found:
        raise ConfigurationError(f"subscriber={subscriber!r}: expected one of {sorted(found)}")
    ask(f"Forget that {subscriber} reads log {log} from {found[subscriber]} on", yes=yes)

    async def delete(namespace: Namespace) -> bool:
        async with await namespace.open_log(log) as manager:
            return await manager.delete_subscription(subscriber)

    deleted = run_async(delete)
    fields = {"log": log, "subscriber": subscriber, "deleted": deleted}
    show_done(f"log {log} has forgotten {subscriber}", fields)


@log_group.command("delete", epilog="Example: dlog log delete clicks --yes")
@click.argument("log")
@click.option("--damaged", is_flag=True, help="Delete a log with damaged metadata, where readable.")
@confirmed
@common_options
def delete_log(log: str, *, damaged: bool, yes: bool) -> None:
    """Delete LOG and its data, permanently.

    A log with damaged metadata is deleted with --damaged.  Ledgers that are not known to belong to
    it remain until `dlog ledger audit --delete`.
    """
    require_consent(yes=yes)
    ask(_deletion(log, damaged=damaged), yes=yes)
    run_async(
        telling_time("deleting", lambda namespace: namespace.delete_log(log, damaged=damaged)),
        is_long=True,
    )
    show_done(f"deleted log {log}", {"log": log})


def _deletion(log: str, *, damaged: bool) -> str:
    """Return what is deleted, for the user's consent."""
    if damaged:
        damage = run_direct(lambda namespace: _damage_of(namespace, log))
        return (
            f"Delete log {log} ({damage or 'which is not damaged'}): its metadata, and the ledgers "
            "that it still names; others stay until `dlog ledger audit --delete`"
        )

    async def describe(namespace: Namespace) -> str:
        async with await namespace.open_log(log) as manager:
            snapshot = await manager.get_snapshot()
            records = await manager.get_log_record_count()
        count, size = len(snapshot.segments), sum(each.size_bytes for each in snapshot.segments)
        return f"Delete log {log} with {records} records in {count} segments, {bytes_text(size)}"

    try:
        return run_async(describe)
    except (CorruptMetadataError, LogNotFoundError, UnexpectedError) as error:
        try:
            damage = run_direct(lambda namespace: _damage_of(namespace, log))
        except UnsupportedError:
            raise error from None  # proxies cannot look closer
        if damage:
            raise CorruptMetadataError(
                f"{damage}; --damaged deletes the log as far as it is readable"
            ) from error
        # It is the metadata of one of its ledgers.
        return f"Delete log {log}, whose contents cannot be counted: {error}"


async def _damage_of(namespace: DirectNamespace, log: str) -> str:
    from dlcore.log.forgetting import damage_of

    return await damage_of(namespace.log_context, log)
