"""`dlog log fork`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from dlcore.base.ids import DLSN
from dlcore.ops.cli.context import common_options, run_async
from dlcore.ops.cli.output import show_done

if TYPE_CHECKING:
    from dlcore.api.namespace import Namespace


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
