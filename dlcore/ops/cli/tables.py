"""`dlog log table`: the table of a log, and its versions by positions; and its line in `show`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from dlcore.base.errors import DLError
from dlcore.base.ids import DLSN
from dlcore.ops.cli.context import common_options, run_direct
from dlcore.ops.cli.output import show_done, show_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.api.log import DistributedLogManager
    from dlcore.backends.direct.namespace import DirectNamespace


@click.command("table", epilog="Example: dlog log table clicks --at 3:17:0")
@click.argument("log")
@click.option("--at", metavar="DLSN", help="Print the first version with all records before it.")
@click.option(
    "--version",
    type=click.IntRange(min=0),
    metavar="N",
    help="Print the first position that this version does not have.",
)
@common_options
def show_table(log: str, at: str | None, version: int | None) -> None:
    """Show the Delta or Iceberg table that follows LOG.

    The end is the first position that is not in it, from which on the log has the rest.
    """
    if at is not None and version is not None:
        raise click.UsageError("--at and --version exclude each other")
    dlsn = None if at is None else DLSN.parse(at)

    async def read(namespace: DirectNamespace) -> dict[str, object]:
        from dlcore.ops.upkeep.table_status import TableReader

        table = await TableReader.of(namespace.log_context, log)
        if dlsn is not None:
            return {"log": log, "version": await table.version_with(dlsn)}
        if version is not None:
            return {"log": log, "end": str(await table.end_of(version))}
        status = await table.status()
        async with await namespace.open_log(log) as manager:
            behind = await manager.get_log_record_count(status.end)
        return {
            "log": log,
            "table": status.url,
            "format": status.form,
            "version": status.version,
            "end": str(status.end),
            "records": status.records,
            "records_after": behind,
            "files": status.files,
            "bytes": status.size_bytes,
        }

    found = run_direct(read)
    if len(found) == 2:
        show_done(str(found["version" if dlsn is not None else "end"]), found)
    else:
        show_fields(found)


async def table_of(
    namespace: DirectNamespace, log: DistributedLogManager, *, limit_s: float
) -> dict[str, object] | None:
    """Return about the table that follows a log; None if the log has no setting `table`.

    A table that cannot be read in time has the reason as `error`, and no version and end.
    """
    settings = await log.get_settings()
    if settings.table is None:
        return None
    fields: dict[str, object] = {"format": settings.table}
    fields |= dict.fromkeys(("url", "version", "end", "records_after", "error"))
    from dlcore.ops.upkeep.table_status import TableReader

    try:
        async with asyncio.timeout(limit_s):
            table = await TableReader.of(namespace.log_context, log.name)
            fields["url"] = table.url
            status = await table.status()
    except DLError as error:
        return fields | {"error": " ".join(str(error).split())}
    except TimeoutError:
        return fields | {"error": f"the store or catalog did not answer within {limit_s:g} s"}
    behind = await log.get_log_record_count(status.end)
    return fields | {
        "version": status.version,
        "end": str(status.end),
        "records_after": behind,
    }


def table_text(table: Mapping[str, object] | None) -> str | None:
    """Return a line for people about what `table_of` returned."""
    if table is None:
        return None
    if table["error"] is not None:
        return f"{table['format']}, cannot be read: {table['error']}"
    return (
        f"{table['format']} version {table['version']} in {table['url']}, up to {table['end']}, "
        f"{table['records_after']} records after that"
    )
