"""`dlog log`: create, list, show, delete, truncate and count logs.

`write` and `tail` live in `dlcore.cli.records`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dlcore.cli.context import common_options, confirm, confirmed, connect
from dlcore.cli.output import show_done, show_fields, show_rows, time_text
from dlcore.cli.records import tail_log, write_log
from dlcore.config import LogConfig, QuorumConfig
from dlcore.errors import LogEmptyError
from dlcore.ids import DLSN

if TYPE_CHECKING:
    from dlcore.sync import DistributedLogManager


@click.group("log")
@common_options
def log_group() -> None:
    """Create, list, show, delete, truncate, write, tail and count logs."""


log_group.add_command(write_log)
log_group.add_command(tail_log)


@log_group.command("create", epilog="Example: dlog log create clicks --replication-factor 3")
@click.argument("log")
@click.option(
    "--replication-factor",
    type=click.IntRange(min=1),
    metavar="N",
    help="Every entry on N bookies, acknowledged by all N; instead of the three quorum options.",
)
@click.option("--ensemble", type=click.IntRange(min=1), metavar="E", help="Bookies per ledger [3].")
@click.option(
    "--write-quorum", type=click.IntRange(min=1), metavar="QW", help="Copies of an entry [3]."
)
@click.option(
    "--ack-quorum", type=click.IntRange(min=1), metavar="QA", help="Copies before an ack [2]."
)
@common_options
def create_log(
    log: str,
    replication_factor: int | None,
    ensemble: int | None,
    write_quorum: int | None,
    ack_quorum: int | None,
) -> None:
    """Create the log LOG.

    Acknowledged records survive the loss of QA - 1 bookies.
    """
    quorum = _quorum(replication_factor, ensemble, write_quorum, ack_quorum)
    with connect() as namespace:
        namespace.create_log(log, config=LogConfig(quorum=quorum))
    sizes = f"{quorum.ensemble_size}/{quorum.write_quorum_size}/{quorum.ack_quorum_size}"
    show_done(f"created log {log} (E/Qw/Qa {sizes})", {"log": log, "quorum": sizes})


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
    # What is not given follows from what is: --ensemble 4 keeps three copies, --ensemble 2 has two.
    ensemble_size = ensemble or max(default.ensemble_size, write_quorum or 0)
    write_quorum_size = write_quorum or min(default.write_quorum_size, ensemble_size)
    ack_quorum_size = ack_quorum or min(default.ack_quorum_size, write_quorum_size)
    return QuorumConfig(
        ensemble_size=ensemble_size,
        write_quorum_size=write_quorum_size,
        ack_quorum_size=ack_quorum_size,
    )


@log_group.command("list", epilog="Example: dlog log list orders/")
@click.argument("prefix", required=False)
@common_options
def list_logs(prefix: str | None) -> None:
    """List the names of the logs, or of those that start with PREFIX."""
    with connect() as namespace:
        names = sorted(namespace.get_logs(prefix))
    show_rows([{"log": name} for name in names], columns=("log",), empty="no logs")


@log_group.command("show", epilog="Example: dlog log show clicks --json")
@click.argument("log")
@common_options
def show_log(log: str) -> None:
    """Show one log: its first and last record, its size, and whether it is sealed."""
    with connect() as namespace, namespace.open_log(log) as manager:
        fields = _log_fields(manager)
    show_fields(fields)


def _log_fields(manager: DistributedLogManager) -> dict[str, object]:
    segments = manager.get_log_segments()
    fields: dict[str, object] = {
        "log": manager.name,
        "segments": len(segments),
        "records": manager.get_log_record_count(),
        "sealed": manager.is_end_of_stream_marked(),
        "created": time_text(segments[0].created_ms) if segments else None,
    }
    try:
        return fields | {
            "first_dlsn": str(manager.get_first_dlsn()),
            "last_dlsn": str(manager.get_last_dlsn()),
            "last_txid": manager.get_last_txid(),
        }
    except LogEmptyError:
        return fields | {"first_dlsn": None, "last_dlsn": None, "last_txid": None}


@log_group.command("count", epilog="Example: dlog log count clicks")
@click.argument("log")
@common_options
def count_records(log: str) -> None:
    """Print how many records LOG holds, truncated ones left out."""
    with connect() as namespace, namespace.open_log(log) as manager:
        count = manager.get_log_record_count()
    show_done(str(count), {"log": log, "records": count})


@log_group.command("truncate", epilog="Example: dlog log truncate clicks 3:17:0 --yes")
@click.argument("log")
@click.argument("dlsn")
@confirmed
@common_options
def truncate_log(log: str, dlsn: str, *, yes: bool) -> None:
    """Drop the records of LOG before position DLSN, for good.

    A position past the end is refused; the end itself drops every record.
    """
    position = DLSN.parse(dlsn)
    confirm(f"Drop the records of log {log} before {position}?", yes=yes)
    with connect() as namespace, namespace.open_log(log) as manager:
        changed = manager.truncate(position)
    fields = {"log": log, "dlsn": str(position), "changed": changed}
    if changed:
        show_done(f"truncated log {log} before {position}", fields)
    else:
        show_done(f"log {log} has nothing before {position}", fields)


@log_group.command("delete", epilog="Example: dlog log delete clicks --yes")
@click.argument("log")
@confirmed
@common_options
def delete_log(log: str, *, yes: bool) -> None:
    """Delete LOG and its data, for good."""
    confirm(f"Delete log {log} and its data?", yes=yes)
    with connect() as namespace:
        namespace.delete_log(log)
    show_done(f"deleted log {log}", {"log": log})
