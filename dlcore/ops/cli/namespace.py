"""`dlog namespace`: create, find and show namespaces."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dlcore.base.clock import SystemClock
from dlcore.metadata.binding import ensure_namespace, find_namespaces, read_binding
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.ops.cli.context import (
    common_options,
    in_time,
    lists_names,
    namespace_uri,
    run_direct,
    wants_json,
    zookeeper_access,
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
    from dlcore.metadata.zookeeper import ZooKeeperStore

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
    """Create the namespace that --uri names.

    An existing one is not changed.
    """
    uri = namespace_uri()

    parsed = parse_uri(uri)

    async def create(store: MetadataStore) -> NamespaceBinding:
        return await ensure_namespace(store, NamespacePaths(parsed.root), SystemClock())

    binding = on_store(parsed.servers, create)
    show_done(f"{uri} is cluster {binding.cluster_id}", {"uri": uri, "cluster": binding.cluster_id})


@namespace_group.command(
    "list", epilog="Example: dlog namespace list --uri distributedlog://127.0.0.1:2181/"
)
@lists_names
@common_options
def list_namespaces() -> None:
    """List the namespaces at and below the path of --uri.

    It looks some levels deep.
    """
    bare = namespace_uri().rstrip("/")
    has_path = "/" in bare.partition("://")[2]
    parsed = parse_uri(bare if has_path else f"{bare}/any")

    async def find(store: MetadataStore) -> list[tuple[str, NamespaceBinding]]:
        return await find_namespaces(store, parsed.root if has_path else "")

    rows = [
        {"path": path, "cluster": binding.cluster_id, "created": time_text(binding.created_ms)}
        for path, binding in on_store(parsed.servers, find)
    ]
    show_rows(rows, columns=("path", "cluster", "created"), empty="no namespaces")


@namespace_group.command(
    "secure", epilog="Example: dlog namespace secure --zk-auth-file /etc/dlog/zookeeper-user"
)
@common_options
def secure_namespace() -> None:
    """Give all nodes in ZooKeeper to one user alone.

    The user is the one in --zk-auth-file.  For a namespace that was made without a user.  Restart
    all processes with the file first, for without it they can read and write nothing afterwards.
    It may be repeated.
    """
    from dlcore.metadata.zookeeper import secure_tree

    uri = namespace_uri()
    credentials, parsed = zookeeper_access().credentials(), parse_uri(uri)
    if credentials is None:
        raise click.UsageError("for which user of ZooKeeper? give --zk-auth-file")

    async def secure(store: ZooKeeperStore) -> int:
        await read_binding(store, NamespacePaths(parsed.root))  # raises if there is no namespace
        return await secure_tree(store, parsed.root)

    count = on_store(parsed.servers, secure, is_long=True)
    show_done(
        f"{count} nodes of {uri} are for {credentials.user} alone",
        {"uri": uri, "user": credentials.user, "nodes": count},
    )


def on_store(
    servers: str,
    work: Callable[[ZooKeeperStore], Coroutine[Any, Any, _Result]],
    *,
    is_long: bool = False,
) -> _Result:
    """Run `work` on a metadata store that may have no namespace yet."""
    from dlcore.metadata.zookeeper import ZooKeeperStore

    access = zookeeper_access()

    async def run() -> _Result:
        store = await ZooKeeperStore.connect(servers, access=access)
        try:
            return await work(store)
        finally:
            await store.aclose()

    return asyncio.run(run() if is_long else in_time(run()))


@namespace_group.command("show", epilog="Example: dlog namespace show --json")
@common_options
def show_namespace() -> None:
    """Show the namespace: cluster, number of logs, bookies, space."""

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


@namespace_group.command("keys", epilog="Example: dlog namespace keys --rotate")
@click.option("--rotate", is_flag=True, help="Add a key, with which capabilities are signed soon.")
@click.option(
    "--withdraw",
    is_flag=True,
    help="Replace all keys at once: all capabilities end.",
)
@common_options
def show_keys(rotate: bool, withdraw: bool) -> None:
    """Show the keys that sign capabilities, made if there are none.

    A key that was replaced verifies until the last capability that it may have signed has expired.
    """
    if rotate and withdraw:
        raise click.UsageError("--rotate and --withdraw: expected one of them")

    async def read(namespace: DirectNamespace) -> list[dict[str, object]]:
        from dlcore.metadata.capability_keys import ensure_keys, rotate_keys

        ports = namespace.ports
        place = ports.store, ports.paths, ports.clock
        if rotate or withdraw:
            ring = await rotate_keys(*place, withdraw=withdraw)
        else:
            ring = await ensure_keys(*place)
        return [
            {
                "public_key": key.public,
                "signs_from": time_text(key.signs_from_s * 1000),
                "may_sign": "yes" if key.private else "no",
            }
            for key in ring.keys
        ]

    rows = run_direct(read)
    show_rows(rows, columns=("public_key", "signs_from", "may_sign"), empty="no keys")


@namespace_group.command("watch", epilog="Example: dlog namespace watch orders/ --json")
@click.argument("prefix", required=False)
@common_options
def watch_namespace(prefix: str | None) -> None:
    """Show creations, deletions and renames, until interrupted.

    The existing logs come first.  With PREFIX only of logs whose names start with it.
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
