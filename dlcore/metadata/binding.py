"""A namespace: its binding, the features of its cluster, and the creation of its tree of nodes.

The binding has the features that were finalized for the cluster (`dlcore/base/features.py`); a
release that lacks one of them does not open it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dlcore.base.errors import (
    ConfigurationError,
    CorruptMetadataError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
    UnsupportedError,
)
from dlcore.base.features import own_release
from dlcore.metadata.port import Create, MetadataStore, Op, Put, Versioned
from dlcore.metadata.stored import LAYOUT, Count, Text, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlcore.base.clock import Clock
    from dlcore.metadata.paths import NamespacePaths


_ATTEMPTS_MAX = 5
"""Most lost races and lost replies; each lost race is another client's success."""


class NamespaceBinding(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a namespace, and its finalized features, sorted.

    Bookies refuse data of another cluster.
    """

    layout: int = LAYOUT
    cluster_id: Text
    created_ms: Count
    features: tuple[Text, ...] = ()


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """Says that the metadata was imported, and when it had been exported."""

    layout: int = LAYOUT
    exported_ms: Count
    imported_ms: Count


async def ensure_namespace(
    store: MetadataStore, paths: NamespacePaths, clock: Clock
) -> NamespaceBinding:
    """Return the namespace's binding, creating the namespace if there is none.

    Binding and tree are created in one transaction: a namespace exists completely or not at all.
    A new one has no members yet, so all features of this release are finalized.
    """
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        node = await store.get(paths.root, fresh=True)
        if node is not None and node.value:
            return _usable(node.value, paths.root)
        binding = _with_features(
            NamespaceBinding(cluster_id=clock.new_token(), created_ms=clock.now_ms()),
            own_release().features,
        )
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
        UnsupportedError: a feature was finalized that this release does not have.
        CorruptMetadataError: the binding does not parse, or has another layout version.
    """
    return (await _read(store, paths, fresh=fresh))[0]


async def finalize_features(
    store: MetadataStore, paths: NamespacePaths, features: Iterable[str]
) -> NamespaceBinding:
    """Add features to those that were finalized, for good; return the new binding.

    The caller has made sure that no member lacks one.

    Raises:
        MetadataVersionError: another client changed the binding meanwhile.
        MetadataError: the store failed; without an answer they are finalized, or are not.
    """
    binding, version = await _read(store, paths, fresh=True)
    changed = _with_features(binding, {*binding.features, *features})
    await store.multi([Put(paths.root, encode(changed), version)])
    return changed


async def _read(
    store: MetadataStore, paths: NamespacePaths, *, fresh: bool
) -> tuple[NamespaceBinding, int]:
    node = await store.get(paths.root, fresh=fresh)
    if not fresh and (node is None or not node.value):
        # This server may be behind the server that created it.
        return await _read(store, paths, fresh=True)
    if node is None or not node.value:
        raise ConfigurationError(
            f"there is no dlog namespace at {paths.root}: the path is wrong, or it was not created"
        )
    return _usable(node.value, paths.root), node.version


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


def _with_features(binding: NamespaceBinding, features: Iterable[str]) -> NamespaceBinding:
    return replace(binding, features=tuple(sorted(features)))


def _usable(value: bytes, root: str) -> NamespaceBinding:
    """Return the binding, unless a feature of the cluster is lacking here."""
    binding, own = decode(NamespaceBinding, value, source=root), own_release()
    if lacking := own.lacks(binding.features):
        raise UnsupportedError(
            f"the namespace {root} uses {', '.join(lacking)}, which dlog {own.version} does not "
            "have: its features were finalized by a later release; install that one here"
        )
    return binding


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


class ClusterFeatures:
    """The finalized features of one namespace.

    A feature remains finalized, and is not asked about again.  One that is not costs a request at
    each call: ask where something is opened or begun, not with each record.
    """

    def __init__(self, store: MetadataStore, paths: NamespacePaths) -> None:
        self._store = store
        self._paths = paths
        self._finalized: frozenset[str] = frozenset()

    async def has(self, name: str) -> bool:
        """Return whether a feature may be used: it was finalized, so no member lacks it.

        Raises: MetadataError: that is not known now.
        """
        if name not in self._finalized:
            binding = await read_binding(self._store, self._paths, fresh=True)
            self._finalized = frozenset(binding.features)
        return name in self._finalized

    async def require(self, name: str) -> None:
        """Return if a feature may be used.

        Raises:
            UnsupportedError: it was not finalized; the message says how that is done.
            MetadataError: that is not known now.
        """
        if not await self.has(name):
            raise UnsupportedError(
                f"the feature {name!r} is not finalized for the cluster: once all members run a "
                "release that has it, dlog upgrade finalize (docs/upgrading.md)"
            )
