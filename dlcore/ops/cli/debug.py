"""`dlog debug`: an archive for experts, and the faults that it shows."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlcore.base.clock import SystemClock, wall_s
from dlcore.ops.cli.context import (
    client_config,
    common_options,
    given_settings,
    namespace_tls,
    namespace_uri,
    proxy_token,
    wants_json,
    zookeeper_access,
)
from dlcore.ops.cli.output import show_done, show_json

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace

_CONNECT_S = 10.0


@click.group("debug")
@common_options
def debug_group() -> None:
    """Collect what shows a fault, and name faults."""


@debug_group.command("bundle", epilog="Example: dlog debug bundle")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@common_options
def make_bundle(file: Path | None) -> None:
    """Collect the state of the cluster and of this host in FILE.

    It has settings, versions, logs, stacks and open files of the servers of this host, memory and
    mounts, answers and clocks of all bookies and proxies, the state of auto-recovery, ledgers, and
    the sizes of ZooKeeper's nodes; no records, no key, no token.  On each host a bundle shows that
    host's servers: call it as their user, or as root.

    It takes less than a minute, also if much does not answer; the output names what is missing.
    """
    from dlcore.backends.direct.namespace import open_namespace
    from dlcore.base.whole_files import whole_file
    from dlcore.ops.diagnosis.archive import MANIFEST, write_archive
    from dlcore.ops.diagnosis.collecting import Collector

    uri, client = namespace_uri(), client_config()
    tls, zookeeper = namespace_tls(), zookeeper_access()
    when = datetime.fromtimestamp(SystemClock().now_ms() / 1000, UTC)
    file = file or Path(f"dlog-bundle-{when:%Y%m%d-%H%M%S}.tar.gz")

    async def open_it() -> DirectNamespace:
        return await open_namespace(
            uri,
            client_config=client,
            tls=tls,
            zookeeper=zookeeper,
            connect_timeout_s=_CONNECT_S,
        )

    settings = {key: value for key, value in given_settings().items() if isinstance(value, str)}
    collector = Collector(open_it, settings=settings, tls=tls, token=proxy_token())
    with whole_file(file, mode=0o600) as out:  # made first, so that a wrong name costs no minute
        bundle = asyncio.run(collector.collect())
        write_archive(out, bundle, now_s=wall_s())
    parts = bundle.values[MANIFEST]["parts"]
    missing = {name: part["problem"] for name, part in parts.items() if part["problem"]}
    lines = [f"{file} has {len(parts) - len(missing)} of {len(parts)} parts"]
    lines += [f"missing: {name}: {problem}" for name, problem in missing.items()]
    show_done("\n".join(lines), {"file": str(file), "missing": missing})


@debug_group.command("explain", epilog="Example: dlog debug explain dlog-bundle.tar.gz")
@click.argument("archive", type=click.Path(dir_okay=False, path_type=Path))
@common_options
def explain_bundle(archive: Path) -> None:
    """Name the faults that ARCHIVE shows, with evidence and advice.

    ARCHIVE was made by `dlog debug bundle`.  No cluster is needed.  Exit code 1 if there are
    faults.
    """
    from dlcore.ops.diagnosis.archive import MANIFEST, read_archive
    from dlcore.ops.diagnosis.faults import explain

    values = read_archive(archive).values
    faults = explain(values)
    if wants_json():
        show_json([asdict(fault) for fault in faults])
    for fault in () if wants_json() else faults:
        click.echo(f"{fault.kind}: {fault.what}")
        for line in fault.evidence:
            click.echo(f"  {line}")
        click.echo(f"  to do: {fault.to_do}")
    parts = values[MANIFEST]["parts"]
    missing = [name for name, part in parts.items() if part["problem"]]
    if not wants_json() and not faults:
        click.echo("no fault is known from this archive")
    if not wants_json() and missing:
        click.echo(f"not judged, because it is missing: {', '.join(missing)}")
    click.get_current_context().exit(1 if faults else 0)
