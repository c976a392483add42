"""Reads a namespace's metadata while it is in use, until a consistent copy of it comes out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dlcore.base.background import all_of
from dlcore.base.errors import MetadataError
from dlcore.base.features import own_release
from dlcore.metadata.binding import read_binding
from dlcore.metadata.paths import BUCKETS
from dlcore.ops.backup.archive import Export, ExportHeader
from dlcore.ops.backup.cut import NotKnownError, anchors_at, copy_of, moment_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlcore.base.clock import Clock
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Versioned
    from dlcore.ops.backup.cut import Copy

logger = logging.getLogger(__name__)

PASSES_MAX = 10
"""Most readings of all nodes after the first one."""
_CUTS_MAX = 20
"""Most readings of the heads between two readings of all nodes."""
_NODES_AT_ONCE = 100
"""Nodes of one request: they may be some KB large."""
_REQUESTS_AT_ONCE = 16
_LISTS_AT_ONCE = 256


async def export_namespace(
    store: MetadataStore, paths: NamespacePaths, clock: Clock
) -> tuple[Export, Copy]:
    """Return an export of the namespace: its logs and commits as of one moment after this call.

    Logs whose metadata are damaged are left out; the export names them.

    Raises:
        ConfigurationError: there is no namespace.
        CorruptMetadataError: the namespace's root is damaged.
        MetadataError: the namespace changed too fast in every pass, or its server does not number
            its transactions.
    """
    await store.sync(paths.root)
    binding = await read_binding(store, paths, fresh=True)
    copy = await _read_copy(store, paths)
    header = ExportHeader(
        root=paths.root,
        cluster_id=binding.cluster_id,
        exported_ms=clock.now_ms(),
        release=own_release().version,
        moment=copy.moment,
        logs=copy.logs,
        ledgers=copy.ledgers,
        left_out=copy.left_out,
    )
    start = len(paths.root)
    return Export(header, {path[start:]: value for path, value in copy.nodes.items()}), copy


async def _read_copy(store: MetadataStore, paths: NamespacePaths) -> Copy:
    before = await _read_all(store, paths.root)
    if before[paths.root].changed == 0:
        raise MetadataError(
            "this metadata server does not number its transactions, so that no export would be "
            "consistent: restart it with this release of dlog"
        )
    why, heads = "", await _read(store, [])
    for number in range(1, PASSES_MAX + 1):
        try:
            moment, anchors = await _cut(store, paths, before)
            after = await _read_all(store, paths.root)
            steady = await _unchanged(store, heads)
            return copy_of(paths, before, anchors, after, moment, steady)
        except NotKnownError as error:
            why = str(error)
            logger.info("pass %d gave no consistent copy: %s", number, why)
            heads = await _read_anchors(store, paths, {})
            before = await _read_all(store, paths.root)
    raise MetadataError(
        f"{paths.root} changed too fast for a consistent copy in {PASSES_MAX} passes: {why}; try "
        "again while less is committed"
    )


async def _cut(
    store: MetadataStore, paths: NamespacePaths, before: dict[str, Versioned]
) -> tuple[int, dict[str, Versioned]]:
    """Return the number of a transaction, and the heads and records of commits right after it."""
    early = await _read_anchors(store, paths, {})
    for _ in range(_CUTS_MAX - 1):
        moment = moment_of(before, early)
        late = await _read_anchors(store, paths, early)
        try:
            return moment, anchors_at(paths, early, late, moment)
        except NotKnownError:
            early = late
    moment = moment_of(before, early)
    return moment, anchors_at(paths, early, await _read_anchors(store, paths, early), moment)


async def _unchanged(store: MetadataStore, known: dict[str, Versioned]) -> set[str]:
    """Return those of the known heads and records that are still the same."""
    now = await _read(store, list(known))
    return {path for path, node in now.items() if node.changed == known[path].changed}


async def _read_anchors(
    store: MetadataStore, paths: NamespacePaths, known: Collection[str]
) -> dict[str, Versioned]:
    """Read the heads and records of commits: the `known` ones first, without a listing."""
    found = await _read(store, list(known))
    parents = [f"{above}/{name}" for above in (paths.heads, paths.commits) for name in BUCKETS]
    lists = await store.get_children_many(parents)
    listed = [
        f"{parent}/{name}"
        for parent, names in zip(parents, lists, strict=True)
        for name in names or ()
    ]
    return found | await _read(store, [path for path in listed if path not in found])


async def _read_all(store: MetadataStore, root: str) -> dict[str, Versioned]:
    """Return all permanent nodes from the root down."""
    found: dict[str, Versioned] = {}
    level = [root]
    while level:
        read = await _read(store, level)
        found |= read
        parents = [path for path, node in read.items() if node.children]
        level = []
        for at in range(0, len(parents), _LISTS_AT_ONCE):
            some = parents[at : at + _LISTS_AT_ONCE]
            for path, names in zip(some, await store.get_children_many(some), strict=True):
                level += [f"{path}/{name}" for name in names or ()]
    return found


async def _read(store: MetadataStore, paths: list[str]) -> dict[str, Versioned]:
    """Return those of the nodes that exist and are permanent."""
    found: dict[str, Versioned] = {}
    step = _NODES_AT_ONCE * _REQUESTS_AT_ONCE
    for first in range(0, len(paths), step):
        some = paths[first : first + step]
        parts = [some[at : at + _NODES_AT_ONCE] for at in range(0, len(some), _NODES_AT_ONCE)]
        lists = await all_of(*(store.get_many(part) for part in parts))
        nodes = [node for each in lists for node in each]
        found |= {
            path: node
            for path, node in zip(some, nodes, strict=True)
            if node is not None and not node.session
        }
    return found
