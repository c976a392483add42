"""`dlog metadata`: the metadata server of one host; exports and imports of metadata."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from msgspec import to_builtins

from dlcore.base.clock import SystemClock
from dlcore.base.errors import ConfigurationError
from dlcore.base.http_options import http_address_of
from dlcore.base.log_lines import Process, log_to_stderr
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.ops.cli.context import (
    ask,
    common_options,
    confirmed,
    log_format,
    namespace_uri,
    note,
    require_consent,
)
from dlcore.ops.cli.namespace import on_store
from dlcore.ops.cli.output import show_done, time_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.metadata.port import MetadataStore
    from dlcore.ops.backup.archive import Export, LeftOut
    from dlcore.ops.backup.cut import Copy


_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group("metadata")
@common_options
def metadata_group() -> None:
    """Serve metadata on one host; export and import it."""


@metadata_group.command("serve", epilog="Example: dlog metadata serve --data-dir ./metadata")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="The folder of its file.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="A loopback address: it has neither users nor TLS.",
)
@click.option(
    "--port",
    type=click.IntRange(min=0, max=65535),
    default=2181,
    show_default=True,
    help="The port; 0: a free one.",
)
@click.option(
    "--http-address",
    default="",
    help="Address of metrics and health over HTTP, like 127.0.0.1:9193; by default there is none.",
)
@common_options
def serve_metadata(*, data_dir: Path, host: str, port: int, http_address: str) -> None:
    """Serve metadata in ZooKeeper's place, on this host.

    It serves until interrupted.  Clients, bookies and proxies name it like a ZooKeeper:
    distributedlog://127.0.0.1:2181/dlog.  It keeps all in one SQLite file, and syncs each change.
    For more hosts than one take ZooKeeper.
    """
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise ConfigurationError(
            f"host={host!r}: expected a loopback address, such as 127.0.0.1, because this server "
            "has neither users nor TLS; for other hosts take ZooKeeper"
        )
    operators = _Operators(http_address)
    http_address_of(operators)  # before anything runs
    from dlcore.base.server_process import report_oneself

    process = Process("metadata-server", str(data_dir))
    settings = {"data_dir": data_dir, "host": host, "port": port, "http_address": http_address}
    report_oneself(process, settings)
    log_to_stderr(process, log_format=log_format(), log_level="info")
    asyncio.run(_serve(data_dir, host, port, operators))


class _Operators(NamedTuple):
    """Where its operators ask; this server has no certificate."""

    http_address: str
    http_tls: str = "none"


async def _serve(folder: Path, host: str, port: int, operators: _Operators) -> None:
    from dlcore.base.listening.operator_port import Operated, operator_port
    from dlcore.ops.metadata_server.server import METRICS, MetadataServer

    loop = asyncio.get_running_loop()
    server = MetadataServer(folder)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    address = await server.start(host, port)
    operated = Operated(
        role="metadata",
        metrics=METRICS,
        sources=[server.samples],
        checks={"serving": server.not_serving},
        trial=server.try_file,
    )
    try:
        async with operator_port(operators, operated, None):
            click.echo(f"metadata server serving on {address}")
            await server.ended
    finally:
        server.close()


@metadata_group.command("export", epilog="Example: dlog metadata export monday.dlog")
@click.argument("place")
@common_options
def export_metadata(place: str) -> None:
    """Copy the metadata to the new file PLACE, or into a store.

    The namespace may be in use: all logs and commits are as they were at one moment.  A file has
    everything but records, also the keys that sign capabilities: keep it as you keep those.  With
    the URL of a tier, as s3://bucket/folder, the copy is an object there, without these keys, and
    `dlog restore` finds it.

    A log whose metadata are damaged is left out.  Standard error and the copy name it, and the exit
    code is 1.
    """
    from dlcore.ops.backup.exporting import export_namespace
    from dlcore.ops.backup.in_store import is_url

    parsed = parse_uri(namespace_uri())

    async def read(store: MetadataStore) -> tuple[Export, Copy]:
        return await export_namespace(store, NamespacePaths(parsed.root), SystemClock())

    if is_url(place):
        export, copy = on_store(parsed.servers, read, is_long=True)
        at = _to_store(place, export)
    else:
        at = place
        from dlcore.base.whole_files import whole_file
        from dlcore.ops.backup.archive import packed

        with whole_file(Path(place), mode=0o600) as out:  # made before anything is read
            export, copy = on_store(parsed.servers, read, is_long=True)
            out.write(packed(export))
    lost = f"; {len(copy.missing)} ledgers that logs name are gone" if copy.missing else ""
    show_done(
        f"{at} has {copy.logs} logs, {copy.ledgers} ledgers, {len(copy.nodes)} nodes{lost}",
        {
            "file": at,
            "cluster": export.header.cluster_id,
            "logs": copy.logs,
            "ledgers": copy.ledgers,
            "nodes": len(copy.nodes),
            "missing_ledgers": list(copy.missing),
            "left_out": [to_builtins(each) for each in copy.left_out],
        },
    )
    if copy.left_out:
        tell_left_out(copy.left_out)
        click.get_current_context().exit(1)


def tell_left_out(logs: Sequence[LeftOut]) -> None:
    """Name the logs that an export does not have, with the reasons, on standard error."""
    for each in logs:
        note(f"left out: log {each.log}, whose metadata are damaged: {each.reason}")


def _to_store(url: str, export: Export) -> str:
    from dlcore.log.cold.stores import StoredObjects
    from dlcore.ops.backup.in_store import put_export

    return asyncio.run(put_export(StoredObjects(), url, export))


@metadata_group.command("import", epilog="Example: dlog metadata import monday.dlog --dry-run")
@click.argument("file", type=_FILE)
@click.option("--dry-run", is_flag=True, help="Only check the file, and that the path is empty.")
@common_options
def import_metadata(file: Path, *, dry_run: bool) -> None:
    """Make the namespace that --uri names of the exported FILE.

    There must be nothing at its path, and no process of the cluster may run.  It is made completely
    or not at all.  All changes since the export are lost.  No bookie deletes a ledger until `dlog
    metadata accept`.  Logs that the export has left out are named on standard error.
    """
    from dlcore.ops.backup.archive import unpacked
    from dlcore.ops.backup.importing import changed_nodes, import_namespace, require_empty

    uri = namespace_uri()
    parsed, clock = parse_uri(uri), SystemClock()
    paths = NamespacePaths(parsed.root)
    export = unpacked(file.read_bytes(), source=str(file))
    header = export.header
    changed_nodes(paths, export, clock.now_ms())  # raises if it is of no namespace

    async def make(store: MetadataStore) -> None:
        if dry_run:
            await require_empty(store, paths)
        else:
            await import_namespace(store, paths, clock, export)

    on_store(parsed.servers, make, is_long=True)
    what = "would be" if dry_run else "is"
    show_done(
        f"{uri} {what} cluster {header.cluster_id} as of {time_text(header.exported_ms)}, with "
        f"{header.logs} logs and {header.ledgers} ledgers",
        {
            "uri": uri,
            "cluster": header.cluster_id,
            "exported": time_text(header.exported_ms),
            "logs": header.logs,
            "ledgers": header.ledgers,
            "nodes": len(export.nodes),
            "dry_run": dry_run,
            "left_out": [to_builtins(each) for each in header.left_out],
        },
    )
    tell_left_out(header.left_out)


@metadata_group.command("accept", epilog="Example: dlog metadata accept --yes")
@confirmed
@common_options
def accept_import(*, yes: bool) -> None:
    """Let bookies delete ledgers again after an import.

    They delete what the metadata does not name: ledgers that were made after the export, and copies
    that were made elsewhere after it.  First see that `dlog log inspect` and `dlog ledger check`
    find every record that should be there.
    """
    require_consent(yes=yes)
    uri = namespace_uri()
    ask(
        f"Let the bookies of {uri} delete ledgers that the imported metadata does not name", yes=yes
    )
    from dlcore.ops.backup.importing import accept_restore

    parsed = parse_uri(uri)

    async def accept(store: MetadataStore) -> bool:
        return await accept_restore(store, NamespacePaths(parsed.root))

    done = on_store(parsed.servers, accept)
    text = "bookies may delete ledgers again" if done else "no import was waiting to be accepted"
    show_done(text, {"uri": uri, "accepted": done})
