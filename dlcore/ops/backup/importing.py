"""Makes a namespace of an export, completely or not at all.

All is created below a root without a value.  The root gets its value last, and before that no
process takes it for a namespace.  An import that was interrupted left a mark there: the next one
removes what it made, and begins again.

After an import three things are different from the exported namespace:

- The next ledger id is far higher.  Ledgers that were made after the export are unknown now, and
  bookies hold entries of them: an id that was given twice would mix them with others.
- It is marked as restored.  Until an operator accepts that, no bookie deletes a ledger.  The
  metadata does not name ledgers that were made, nor copies that were made elsewhere, after the
  export, so that both would look deleted.
- Versions of nodes begin at 0.  All processes must have been stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError, CorruptMetadataError, NoNodeError
from dlcore.metadata.binding import NamespaceBinding, Restored
from dlcore.metadata.port import REQUEST_BYTES_MAX, Create, Delete, Put
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dlcore.base.clock import Clock
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Op
    from dlcore.ops.backup.archive import Export

IDS_SKIPPED = 1_000_000_000
"""Ledger ids that are left out: a thousand new ledgers a second take so many in eleven days."""
_OPS_AT_ONCE = 500
_BYTES_AT_ONCE = REQUEST_BYTES_MAX // 2
_NAMES_SHOWN = 5


def mark_of(paths: NamespacePaths) -> str:
    """Return the path of the node that exists while an import is made."""
    return f"{paths.root}/importing"


async def require_empty(store: MetadataStore, paths: NamespacePaths) -> None:
    """Refuse a root with anything in it but an interrupted import.

    Raises:
        ConfigurationError: it names what is there.
    """
    node = await store.get(paths.root, fresh=True)
    if node is None:
        return
    if node.value:
        binding = decode(NamespaceBinding, node.value, source=paths.root)
        raise ConfigurationError(
            f"there is a namespace at {paths.root} already, cluster {binding.cluster_id}: expected "
            "a path without one"
        )
    names = await store.get_children(paths.root, fresh=True) or []
    if names and await store.get(mark_of(paths)) is None:
        raise ConfigurationError(
            f"{paths.root} has nodes of others ({', '.join(names[:_NAMES_SHOWN])}): expected a "
            "path with nothing below it"
        )


async def import_namespace(
    store: MetadataStore, paths: NamespacePaths, clock: Clock, export: Export
) -> int:
    """Make the namespace at an empty path; return the number of its nodes.

    Raises:
        ConfigurationError: the path is not empty.
        CorruptMetadataError: the export is of no namespace.
        MetadataError: it is interrupted; the next import begins again.
    """
    nodes = changed_nodes(paths, export, clock.now_ms())
    await require_empty(store, paths)
    mark, binding = mark_of(paths), nodes.pop(paths.root)
    if await store.get(paths.root) is None:
        await store.create(paths.root, make_parents=True)
    if await store.get(mark) is None:
        await store.create(mark)
    await _remove_below(store, paths.root, kept=mark)
    for ops in _creations(nodes):
        await store.multi(ops)
    root = await store.get(paths.root, fresh=True)
    if root is None or root.value:
        raise ConfigurationError(f"{paths.root} was changed by another program meanwhile")
    await store.multi([Delete(mark), Put(paths.root, binding, root.version)])
    return len(nodes) + 1


def changed_nodes(paths: NamespacePaths, export: Export, now_ms: int) -> dict[str, bytes]:
    """Return the nodes to make, by path.

    Raises:
        CorruptMetadataError: the export is of no namespace.
    """
    nodes = {paths.root + path: value for path, value in export.nodes.items()}
    try:
        decode(NamespaceBinding, nodes[paths.root], source="the export's root")
        next_id = int(nodes[paths.ledger_idgen])
    except (KeyError, ValueError) as error:
        raise CorruptMetadataError(f"the export is of no namespace: {error!r}") from error
    nodes[paths.ledger_idgen] = b"%d" % (next_id + IDS_SKIPPED)
    nodes[paths.restored] = encode(
        Restored(exported_ms=export.header.exported_ms, imported_ms=now_ms)
    )
    return nodes


def _creations(nodes: Mapping[str, bytes]) -> Iterator[list[Op]]:
    """Yield the creations of all nodes in transactions, parents first."""
    ops: list[Op] = []
    size = 0
    for path, value in sorted(nodes.items()):
        if ops and (len(ops) == _OPS_AT_ONCE or size + len(value) > _BYTES_AT_ONCE):
            yield ops
            ops, size = [], 0
        ops.append(Create(path, value))
        size += len(value) + len(path)
    if ops:
        yield ops


async def _remove_below(store: MetadataStore, path: str, *, kept: str) -> None:
    """Remove what an interrupted import made."""
    for name in await store.get_children(path, fresh=True) or ():
        child = f"{path}/{name}"
        if child != kept:
            await _remove_below(store, child, kept=kept)
            await store.delete(child)


async def accept_restore(store: MetadataStore, paths: NamespacePaths) -> bool:
    """Let bookies delete ledgers again; return whether they were held back."""
    try:
        await store.delete(paths.restored)
    except NoNodeError:
        return False
    return True
