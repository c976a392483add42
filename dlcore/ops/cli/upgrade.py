"""`dlog upgrade`: which releases the members of a cluster run, and features that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dlcore.ops.cli.context import (
    ask,
    common_options,
    confirmed,
    require_consent,
    run_direct,
    wants_json,
)
from dlcore.ops.cli.output import show_done, show_json, show_rows

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ops.upgrade_report import UpgradeReport


@click.group("upgrade")
@common_options
def upgrade_group() -> None:
    """See what the members run, and finalize an upgrade."""


@upgrade_group.command("check", epilog="Example: dlog upgrade check --json")
@common_options
def check_upgrade() -> None:
    """Show the members, and what is in the way of finalizing.

    Members are bookies, auto-recovery, proxies, and clients that write now.  Features are those of
    this release of dlog.  The exit code is 1 if something is in the way.  See docs/upgrading.md.
    """
    from dlcore.ops.upgrade_members import look

    async def work(namespace: DirectNamespace) -> UpgradeReport:
        return await look(namespace.ports)

    report = run_direct(work)
    _show(report)
    if report.obstacles:
        click.get_current_context().exit(1)


@upgrade_group.command("finalize", epilog="Example: dlog upgrade finalize --yes")
@confirmed
@common_options
def finalize_upgrade(yes: bool) -> None:
    """Let the cluster use all features of this release.

    From then on no release that lacks one of them can be started: there is no way back.  It is
    refused while a member lacks one.
    """
    from dlcore.ops.upgrade_members import finalize

    require_consent(yes=yes)
    ask("finalize all features of this release, which ends the way back", yes=yes)

    async def work(namespace: DirectNamespace) -> UpgradeReport:
        return await finalize(namespace.ports)

    report = run_direct(work)
    names = ", ".join(report.finalized) or "no feature"
    show_done(f"finalized: {names}", {"finalized": list(report.finalized)})
    if report.obstacles:
        # It came meanwhile, and knows nothing of features; a later release refuses to start.
        click.echo(f"error: stop it: {report.summary()}", err=True)
        click.get_current_context().exit(1)


def _show(report: UpgradeReport) -> None:
    rows: list[dict[str, object]] = [
        {
            "role": member.role.value,
            "name": member.name,
            "version": None if member.problem else member.version,
            "features": list(member.release.features),
        }
        for member in report.members
    ]
    if wants_json():
        show_json(
            {
                "version": report.own.version,
                "members": rows,
                "finalized": list(report.finalized),
                "unfinalized": list(report.unfinalized),
                "obstacles": list(report.obstacles),
                "may_finalize": report.may_finalize,
            }
        )
        return
    show_rows(rows, columns=("role", "name", "version", "features"), empty="no members")
    click.echo(report.summary())
