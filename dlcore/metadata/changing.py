"""Changes one node by compare-and-set: read, decide, write if the node is unchanged, else again.

Promises:

* What is written was decided by the value that it replaces.
* A change whose answer was lost is decided again by what is stored then.  Therefore `change` must
  do no harm when it meets its own result.
* Each lost race is another client's success, so nothing waits between attempts.  After the last of
  them the caller gets its error: without an answer, the outcome is unknown.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from dlcore.base.errors import MetadataConnectionError
from dlcore.metadata.port import CONFLICTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.metadata.port import MetadataStore, Versioned

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)

ATTEMPTS_MAX = 10
"""Most lost races and lost replies of one change."""


async def change_node(
    store: MetadataStore,
    path: str,
    change: Callable[[Versioned | None], tuple[_Result, bytes | None]],
    *,
    make_parents: bool = False,
) -> _Result:
    """Change a node; return the result that belongs to what is stored.

    Args:
        store: the store.
        path: the node's.
        change: gets the node, None if there is none; returns the result, and the new value, None
            to leave the node as it is.  A refusal that it raises ends the change.
        make_parents: whether a new node's missing parents are made too.

    Raises:
        MetadataVersionError, NodeExistsError, NoNodeError: other clients were first each time, or
            the node's parent does not exist.
        MetadataError: the store failed; without an answer, the change may have been made.
    """
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            node = await store.get(path, fresh=True)
            result, value = change(node)
            if value is None:
                return result
            if node is None:
                await store.create(path, value, make_parents=make_parents)
            else:
                await store.put(path, value, version=node.version)
        except (*CONFLICTS, MetadataConnectionError) as error:
            if attempt == ATTEMPTS_MAX:
                raise
            logger.debug("%s is read again: %s", path, error)
        else:
            return result
    raise AssertionError("unreachable: the last attempt returns or raises")
