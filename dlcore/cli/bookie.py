"""`dlog bookie`: the storage nodes of a namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dlcore.autorecovery.maintenance import Maintenance
from dlcore.cli.context import common_options, confirm, confirmed, connect, run_async
from dlcore.cli.output import show_done, show_rows

if TYPE_CHECKING:
    from dlcore.namespace import Namespace


@click.group("bookie")
@common_options
def bookie_group() -> None:
    """Look at the bookies that are registered, and give one up."""


@bookie_group.command(
    "list", epilog="Example: dlog bookie list --uri distributedlog://127.0.0.1:2181/dlog"
)
@common_options
def list_bookies() -> None:
    """List the bookies that are registered now: where they are, their room, if they take writes.

    Free space is as of some minutes ago at most.
    """
    with connect() as namespace:
        bookies = sorted(namespace.get_bookies(), key=lambda info: info.bookie)
    rows = [
        {
            "name": info.bookie.name,
            "address": info.address,
            "rack": info.rack,
            "state": "read-only" if info.read_only else "writable",
            "free": _gib(info.free_bytes) if info.total_bytes else "unknown",
            "free_bytes": info.free_bytes if info.total_bytes else None,
            "total_bytes": info.total_bytes or None,
            "incarnation": info.bookie.incarnation,
        }
        for info in bookies
    ]
    show_rows(
        rows,
        columns=("name", "address", "rack", "state", "free", "incarnation"),
        empty="no bookie is registered",
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


@bookie_group.command("decommission", epilog="Example: dlog bookie decommission bookie-3 --yes")
@click.argument("name")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for auto-recovery.",
)
@confirmed
@common_options
def decommission(name: str, timeout_s: float, *, yes: bool) -> None:
    """Give up the bookie NAME, which must be stopped: others take over all that it held.

    Auto-recovery does the work.  Progress goes to standard error.  When no ledger needs the bookie
    any more its cookie is deleted; an interrupted decommission may be started again.
    """

    confirm(f"Give up bookie {name} for good, with all that its disk holds?", yes=yes)

    async def move(namespace: Namespace) -> int:
        return await Maintenance(namespace.recovery_services).decommission(
            name, timeout_s=timeout_s, report=lambda text: click.echo(text, err=True)
        )

    moved = run_async(move)
    show_done(
        f"decommissioned {name}: {moved} ledgers moved", {"bookie": name, "ledgers_moved": moved}
    )


@bookie_group.command("collect", epilog="Example: dlog bookie collect bookie-3 --yes")
@click.argument("name")
@confirmed
@common_options
def collect(name: str, *, yes: bool) -> None:
    """Let the bookie NAME collect the garbage that its brake holds back.

    A bookie for which most ledgers look deleted at once keeps them for a day, in case that their
    metadata vanished by accident; its log says so.  This lets them go with its next passes, once.
    """
    confirm(f"Drop what bookie {name} holds of ledgers without metadata?", yes=yes)

    async def release(namespace: Namespace) -> None:
        await Maintenance(namespace.recovery_services).release_garbage(name)

    run_async(release)
    show_done(f"bookie {name} will collect what was held back", {"bookie": name})
