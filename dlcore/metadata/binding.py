"""A namespace: its binding, and the creation of its tree of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dlcore.base.errors import (
    ConfigurationError,
    CorruptMetadataError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
)
from dlcore.metadata.port import Create, MetadataStore, Op, Put, Versioned
from dlcore.metadata.stored import LAYOUT, Count, Text, decode, encode

if TYPE_CHECKING:
    from dlcore.base.clock import Clock
    from dlcore.metadata.paths import NamespacePaths

_ATTEMPTS_MAX = 5
"""Most lost races and lost replies; each lost race is another client's success."""


class NamespaceBinding(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a namespace; bookies refuse data of another cluster."""

    layout: int = LAYOUT
    cluster_id: Text
    created_ms: Count


async def ensure_namespace(
    store: MetadataStore, paths: NamespacePaths, clock: Clock
) -> NamespaceBinding:
    """Return the namespace's binding, creating the namespace if there is none.

    Binding and tree are created in one transaction: a namespace exists completely or not at all.
    """
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        node = await store.get(paths.root, fresh=True)
        if node is not None and node.value:
            return decode(NamespaceBinding, node.value, source=paths.root)
        binding = NamespaceBinding(cluster_id=clock.new_token(), created_ms=clock.now_ms())
        try:
            if node is None:
                await _make_ancestors(store, paths)
            await store.multi(_creation(paths, binding, node))
        except (NodeExistsError, MetadataVersionError, MetadataConnectionError):
            # Another client was first, or our reply was lost: read again.
            if attempt == _ATTEMPTS_MAX:
                raise
        else:
            return binding
    raise AssertionError("unreachable: the last attempt returns or raises")


async def read_binding(
    store: MetadataStore, paths: NamespacePaths, *, fresh: bool = False
) -> NamespaceBinding:
    """Return the binding of an existing namespace.

    Raises:
        ConfigurationError: there is no namespace at this path.
        CorruptMetadataError: the binding does not parse, or has another layout version.
    """
    node = await store.get(paths.root, fresh=fresh)
    if not fresh and (node is None or not node.value):
        # This server may be behind the server that created it.
        return await read_binding(store, paths, fresh=True)
    if node is None or not node.value:
        raise ConfigurationError(
            f"there is no dlog namespace at {paths.root}: the path is wrong, or it was not created"
        )
    return decode(NamespaceBinding, node.value, source=paths.root)


async def find_namespaces(
    store: MetadataStore, root: str, *, depth_max: int = 4
) -> list[tuple[str, NamespaceBinding]]:
    """Return the namespaces at and below `root` ("": the top), but not those inside of others."""
    if root:
        node = await store.get(root)
        if node is not None and node.value:
            try:
                return [(root, decode(NamespaceBinding, node.value, source=root))]
            except CorruptMetadataError:
                return []  # another program's node
    if depth_max == 0:
        return []
    found = []
    for name in await store.get_children(root or "/") or ():
        found += await find_namespaces(store, f"{root}/{name}", depth_max=depth_max - 1)
    return found


async def _make_ancestors(store: MetadataStore, paths: NamespacePaths) -> None:
    above = paths.root.rpartition("/")[0]
    if above and await store.get(above) is None:
        await store.create(above, make_parents=True)


def _creation(
    paths: NamespacePaths, binding: NamespaceBinding, existing: Versioned | None
) -> list[Op]:
    value = encode(binding)
    # An empty node was created only as the parent of another node.
    root: Op = (
        Create(paths.root, value) if existing is None else Put(paths.root, value, existing.version)
    )
    return [
        root,
        Create(paths.bookies_available.rpartition("/")[0]),
        Create(paths.bookies_available),
        Create(paths.bookies_readonly),
        Create(paths.cookies),
        Create(paths.ledgers),
        Create(paths.ledger_idgen, b"0"),
        Create(paths.logs),
        Create(paths.heads),
        Create(paths.deleted_logs),
        Create(paths.commits),
        Create(paths.staging),
        Create(paths.staging_owners),
        Create(paths.merged),
        Create(paths.retained_logs),
        Create(paths.upkeep),
        Create(paths.upkeep_requests),
        Create(paths.upkeep_locks),
        Create(paths.proxies),
        *(Create(bucket) for bucket in paths.buckets),
    ]
