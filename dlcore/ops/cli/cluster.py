"""`dlog cluster`: what is done to all processes of a cluster, and holds for all."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from dlcore.base.errors import DLError
from dlcore.ops.cli.context import (
    ask,
    common_options,
    confirmed,
    namespace_tls,
    note,
    proxy_token,
    require_consent,
    run_direct,
)
from dlcore.ops.cli.keeping import setting_of
from dlcore.ops.cli.output import show_done, show_rows

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.metadata.cluster_settings import Tables
    from dlcore.ops.rolling.restart import Member
    from dlcore.ops.upkeep.tiers import KnownTier


@click.group("cluster")
@common_options
def cluster_group() -> None:
    """Restart a cluster in turn; its settings and tiers."""


@cluster_group.command(
    "settings", epilog="Example: dlog cluster settings --set proxy.log_bytes_per_s=1e6"
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="TABLE.KEY=VALUE",
    help="Change a setting; may be repeated.  TABLE: proxy, autorecovery or log.",
)
@click.option("--unset", multiple=True, metavar="TABLE.KEY", help="Leave it to each process.")
@common_options
def show_settings(changes: tuple[str, ...], unset: tuple[str, ...]) -> None:
    """Show and change what holds for all processes.

    A program takes these settings over within moments, without a restart, and before what it was
    started with.  docs/configuration.md marks them as live.  log.retention_s and
    log.explicit_truncation are for logs that are created from now on.  A wrong value is refused,
    and nothing is stored.
    """
    wanted: dict[tuple[str, str], Any] = {_key_of(name): None for name in unset}
    for change in changes:
        key, value = setting_of(change)
        wanted[_key_of(key)] = value

    async def change_and_read(namespace: DirectNamespace) -> Tables:
        from dlcore.metadata.cluster_settings import ClusterSettingsStore
        from dlcore.ops.live_settings import require_allowed

        store = ClusterSettingsStore(namespace.ports.store, namespace.ports.paths)
        return await (store.change(wanted, require_allowed) if wanted else store.read())

    tables = run_direct(change_and_read)
    rows = [
        {"setting": f"{table}.{key}", "value": value}
        for table, values in sorted(tables.items())
        for key, value in sorted(values.items())
    ]
    show_rows(rows, columns=("setting", "value"), empty="no settings: each process has its own")


def _key_of(name: str) -> tuple[str, str]:
    table, separator, key = name.partition(".")
    if not separator:
        raise click.UsageError(f"{name!r}: expected TABLE.KEY, like proxy.bytes_per_s")
    return table, key


@cluster_group.command("tiers", epilog="Example: dlog cluster tiers")
@common_options
def list_tiers() -> None:
    """List the tiers of cold segments, and whether each answers.

    These are all stores to which a segment of any log ever went.  A redaction looks into each of
    them, with the credentials of this command.
    """

    async def read(namespace: DirectNamespace) -> list[KnownTier]:
        from dlcore.ops.upkeep.tiers import known_tiers

        return await known_tiers(namespace.log_context)

    rows = [
        {
            "tier": each.url,
            "state": "no answer" if each.problem else "answers",
            "problem": each.problem or None,
        }
        for each in run_direct(read, is_long=True)
    ]
    show_rows(rows, columns=("tier", "state", "problem"), empty="no segment went to a tier")


@cluster_group.command(
    "forget-tier", epilog="Example: dlog cluster forget-tier s3://old/logs --yes"
)
@click.argument("url", metavar="URL")
@confirmed
@common_options
def forget_tier_at(url: str, *, yes: bool) -> None:
    """Forget the tier at URL, whose store is gone for good.

    It is refused while settings name the tier, or a ledger has its entries there.  Objects that
    stay there are out of the cluster's sight: a redaction does not look into them any more.
    """
    require_consent(yes=yes)
    ask(f"Forget tier {url}, into which no redaction looks then", yes=yes)

    async def forget(namespace: DirectNamespace) -> None:
        from dlcore.ops.upkeep.tiers import forget_tier

        await forget_tier(namespace.log_context, url)

    run_direct(forget, is_long=True)
    show_done(f"the cluster has forgotten {url}", {"forgotten": url})


@cluster_group.command(
    "restart",
    epilog="Example: dlog cluster restart --bookies 'ssh {host} systemctl restart dlog-bookie'",
)
@click.option("--bookies", metavar="COMMAND", help="How to restart a bookie.")
@click.option("--proxies", metavar="COMMAND", help="How to restart a proxy.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each step may take.",
)
@confirmed
@common_options
def restart_cluster(bookies: str | None, proxies: str | None, wait_s: float, *, yes: bool) -> None:
    """Restart bookies, then proxies, one after the other.

    The cluster may be in use.
    COMMAND is run for each of them, here and without a shell, with {name}, {host} and {port} filled
    in.  None is restarted before all are ready and no ledger lacks a replica; a proxy hands its
    logs over first.  The command stops at the first failure, and when something takes longer than
    --wait; a proxy that was not restarted then takes logs again.
    """
    commands = {False: bookies, True: proxies}
    for command in filter(None, commands.values()):
        try:
            shlex.split(command)
        except ValueError as error:
            raise click.UsageError(f"{command!r} is no command: {error}") from error
        if command.startswith("-"):  # the next option, which was taken for it
            raise click.UsageError(
                f"{command!r} is no command: expected one such as 'systemctl restart {{name}}'"
            )
    if not any(commands.values()):
        raise click.UsageError("nothing to restart: give --bookies or --proxies")
    require_consent(yes=yes)
    tls, token = namespace_tls(), proxy_token()

    async def restart(namespace: DirectNamespace) -> tuple[str, ...]:
        from dlcore.ops.rolling.restarting import (
            Restarter,
            command_of,
            find_members,
            run_command,
        )

        members = await find_members(namespace)
        chosen = [each for each in members if commands[each.is_proxy]]
        names = ", ".join(each.name for each in chosen)
        ask(f"Restart {len(chosen)} processes: {names}", yes=yes)

        async def run(member: Member) -> None:
            template = commands[member.is_proxy]
            assert template is not None
            await run_command(command_of(template, member), patience_s=wait_s)

        restarter = Restarter(namespace, run=run, report=note, tls=tls, token=token)
        ended = await restarter.restart(members, chosen, patience_s=wait_s)
        if ended.reason:
            done = ", ".join(ended.names) or "none"
            raise DLError(f"stopped: {ended.reason}; restarted before: {done}")
        return ended.names

    restarted = run_direct(restart, is_long=True)
    show_done(f"{len(restarted)} processes were restarted", {"restarted": list(restarted)})
