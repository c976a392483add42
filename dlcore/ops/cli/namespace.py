"""`dlog namespace`: create, find and show namespaces."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dlcore.base.clock import SystemClock
from dlcore.metadata.binding import ensure_namespace, find_namespaces
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.ops.cli.context import (
    common_options,
    in_time,
    lists_names,
    namespace_uri,
    run_direct,
    wants_json,
)
from dlcore.ops.cli.output import (
    bytes_text,
    printable,
    show_done,
    show_fields,
    show_json,
    show_rows,
    time_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.metadata.binding import NamespaceBinding
    from dlcore.metadata.port import MetadataStore

_Result = TypeVar("_Result")


@click.group("namespace")
@common_options
def namespace_group() -> None:
    """Create, list, show and watch namespaces."""


@namespace_group.command(
    "create", epilog="Example: dlog namespace create --uri distributedlog://127.0.0.1:2181/dlog"
)
@common_options
def create_namespace() -> None:
    """Create the namespace that --uri names; an existing one is not changed."""
    uri = namespace_uri()

    parsed = parse_uri(uri)

    async def create(store: MetadataStore) -> NamespaceBinding:
        return await ensure_namespace(store, NamespacePaths(parsed.root), SystemClock())

    binding = _on_store(parsed.servers, create)
    show_done(f"{uri} is cluster {binding.cluster_id}", {"uri": uri, "cluster": binding.cluster_id})


@namespace_group.command(
    "list", epilog="Example: dlog namespace list --uri distributedlog://127.0.0.1:2181/"
)
@lists_names
@common_options
def list_namespaces() -> None:
    """List the namespaces at and below the path of --uri, some levels deep."""
    bare = namespace_uri().rstrip("/")
    has_path = "/" in bare.partition("://")[2]
    parsed = parse_uri(bare if has_path else f"{bare}/any")

    async def find(store: MetadataStore) -> list[tuple[str, NamespaceBinding]]:
        return await find_namespaces(store, parsed.root if has_path else "")

    rows = [
        {"path": path, "cluster": binding.cluster_id, "created": time_text(binding.created_ms)}
        for path, binding in _on_store(parsed.servers, find)
    ]
    show_rows(rows, columns=("path", "cluster", "created"), empty="no namespaces")


def _on_store(
    servers: str, work: Callable[[MetadataStore], Coroutine[Any, Any, _Result]]
) -> _Result:
    """Run `work` on a metadata store that may have no namespace yet."""
    from dlcore.metadata.zookeeper import ZooKeeperStore

    async def run() -> _Result:
        store = await ZooKeeperStore.connect(servers)
        try:
            return await work(store)
        finally:
            await store.aclose()

    return asyncio.run(in_time(run()))


@namespace_group.command("show", epilog="Example: dlog namespace show --json")
@common_options
def show_namespace() -> None:
    """Show the namespace: its cluster, the number of its logs, its bookies and their free space."""

    async def read(namespace: DirectNamespace) -> dict[str, object]:
        context = namespace.ports
        bookies = await namespace.get_bookies()
        free = sum(bookie.free_bytes for bookie in bookies)
        return {
            "uri": namespace.uri,
            "cluster": namespace.log_context.cluster_id,
            "logs": len(await namespace.get_logs()),
            "bookies_writable": sum(not bookie.read_only for bookie in bookies),
            "bookies_read_only": sum(bookie.read_only for bookie in bookies),
            "free": bytes_text(free),
            "free_bytes": free,
            "next_ledger": await context.ledger_store.next_ledger_id(),
        }

    show_fields(run_direct(read))


@namespace_group.command("watch", epilog="Example: dlog namespace watch orders/ --json")
@click.argument("prefix", required=False)
@common_options
def watch_namespace(prefix: str | None) -> None:
    """Show the existing logs, and then creations, deletions and renames, until interrupted.

    With PREFIX only of logs whose names start with it.
    """
    as_json = wants_json()

    async def watch(namespace: DirectNamespace) -> None:
        async with namespace.watch_logs(prefix) as changes:
            async for change in changes:
                if as_json:
                    fields = {"event": change.kind.value, "log": change.name}
                    show_json(fields | {"old_name": change.old_name, "log_id": change.log_id})
                else:
                    was = "" if change.old_name is None else f" (was {change.old_name})"
                    click.echo(f"{change.kind.value:<8} {printable(change.name + was)}")

    run_direct(watch, is_long=True)
