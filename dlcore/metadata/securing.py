"""Gives the nodes of a namespace that was made for everybody to one user of ZooKeeper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.background import all_of
from dlcore.base.errors import NoNodeError

if TYPE_CHECKING:
    from dlcore.metadata.zookeeper import ZooKeeperStore

_AT_ONCE = 500


async def secure_tree(store: ZooKeeperStore, root: str) -> int:
    """Give every node from `root` down to the user of the session alone; return their number.

    A node comes before those below it.  Therefore others can make no new ones there meanwhile.

    Raises:
        MetadataError: a node is another user's; those before it are secured.
    """
    count, level = 0, [root]
    while level:
        below: list[str] = []
        for at in range(0, len(level), _AT_ONCE):
            found = await all_of(*(_secure(store, path) for path in level[at:][:_AT_ONCE]))
            count += sum(names is not None for names in found)
            for path, names in zip(level[at:][:_AT_ONCE], found, strict=True):
                below += [f"{path}/{name}" for name in names or ()]
        level = below
    return count


async def _secure(store: ZooKeeperStore, path: str) -> list[str] | None:
    """Return the names below a node that is secured now; None: it is gone."""
    try:
        await store.secure(path)
    except NoNodeError:
        return None
    return await store.get_children(path, fresh=True)
