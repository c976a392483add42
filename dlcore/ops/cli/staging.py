"""`dlog staging`: staged records that belong to no log yet, and leftovers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from dlcore.base.clock import SystemClock
from dlcore.ops.cli.context import ask, common_options, confirmed, require_consent, run_direct
from dlcore.ops.cli.output import Progress, show_done, show_rows, telling_time, time_text
from dlcore.ops.upkeep.config import UpkeepConfig

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.upkeep.staged import StagedStatus

_DEFAULTS = UpkeepConfig()
_DAY_S = 24 * 3600
_DAY_MS = _DAY_S * 1000


@click.group("staging")
@common_options
def staging_group() -> None:
    """Show what appends have staged, and remove leftovers."""


@staging_group.command("list", epilog="Example: dlog staging list")
@common_options
def list_staged() -> None:
    """List the staged ledgers with extents that may still be committed.

    The ledger of a dead process is cleaned up after the next commit of its identity, or by age.
    """

    async def read(namespace: DirectNamespace) -> list[StagedStatus]:
        from dlcore.log.upkeep.staged import list_all_staged

        return await list_all_staged(namespace.log_context)

    rows = [
        {
            "identity": each.staged.identity,
            "ledger": each.staged.ledger_id,
            "created": time_text(each.staged.created_ms),
            "state": "filled" if each.is_filled else "closed" if not each.staged.owner else "left",
            "extents": each.staged.extents,
        }
        for each in run_direct(read)
    ]
    show_rows(
        rows,
        columns=("identity", "ledger", "created", "state", "extents"),
        empty="nothing is staged",
    )


@staging_group.command("clean", epilog="Example: dlog staging clean --leftovers-days 0.5 --yes")
@click.option(
    "--leftovers-days",
    type=click.FloatRange(min=0),
    default=_DEFAULTS.leftovers_age_s / _DAY_S,
    show_default=True,
    metavar="DAYS",
    help="Age from which leftovers of dead processes are removed.",
)
@click.option(
    "--commits-days",
    type=click.FloatRange(min=0),
    default=_DEFAULTS.commits_age_s / _DAY_S,
    show_default=True,
    metavar="DAYS",
    help="Age from which records of commits are removed; later replays are not recognized.",
)
@confirmed
@common_options
def clean(leftovers_days: float, commits_days: float, *, yes: bool) -> None:
    """Remove staged ledgers of dead processes, and old records.

    The ledgers were not committed; the records are those of commits.  The upkeep in auto-recovery
    does the same from time to time, with the defaults.
    """
    require_consent(yes=yes)
    now_ms = SystemClock().now_ms()
    leftovers_ms = now_ms - int(leftovers_days * _DAY_MS)
    commits_ms = now_ms - int(commits_days * _DAY_MS)
    left, old = run_direct(
        partial(_count_old, leftovers_ms=leftovers_ms, commits_ms=commits_ms), is_long=True
    )
    ask(
        f"Drop what was left over {leftovers_days:g} days ago: {left} staged ledgers; and records "
        f"of commits that are {commits_days:g} days old: {old}",
        yes=yes,
    )

    async def remove(namespace: DirectNamespace) -> tuple[int, int]:
        from dlcore.log.metadata.commit_records import sweep_commits
        from dlcore.log.upkeep.staged import settle_abandoned

        context = namespace.log_context
        ledgers = await settle_abandoned(context, created_before_ms=leftovers_ms)
        return ledgers, await sweep_commits(context.store, context.paths, before_ms=commits_ms)

    ledgers, records = run_direct(telling_time("cleaning", remove), is_long=True)
    show_done(
        f"settled {ledgers} staged ledgers, removed {records} records of commits",
        {"ledgers": ledgers, "records": records},
    )


async def _count_old(
    namespace: DirectNamespace, *, leftovers_ms: int, commits_ms: int
) -> tuple[int, int]:
    """Return how many staged ledgers and records of commits are older than these times."""
    from dlcore.log.metadata.commit_records import commit_records
    from dlcore.log.upkeep.staged import list_all_staged

    with Progress() as progress:
        staged = await list_all_staged(namespace.log_context)
        left = sum(not each.is_filled and each.staged.created_ms < leftovers_ms for each in staged)
        seen = old = 0
        ports = namespace.ports
        async for _, _, record in commit_records(ports.store, ports.paths):
            seen += 1
            old += record.committed_ms < commits_ms
            progress.tell("records of commits looked at", seen)
    return left, old
