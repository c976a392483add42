"""Deletes the objects of tiers that no ledger names, once they are old enough.

An object's name has its ledger's id and token.  The ledger is there before the object, and while
anything may still name the object; it is never there again once it is gone.  Therefore the ledger
of each listed object that is old enough is looked up after the list, and it alone decides.
"""

from __future__ import annotations

import logging
import re
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Protocol

from dlcore.base.errors import ObjectStoreError
from dlcore.base.isolating import Troubles
from dlcore.ledger.metadata.values import LedgerMetadata
from dlcore.metadata.one_node import persistently
from dlcore.metadata.paths import unescape
from dlcore.metadata.stored import decode_or_tell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.log.context import LogContext
    from dlcore.metadata.port import Versioned

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<ledger>\d{1,19})-(?P<token>.+)-\d+-\d+\.parquet")
_LEDGERS_AT_ONCE = 100


async def tier_urls(context: LogContext, *, fresh: bool = False) -> list[str]:
    """Return the URLs of the tiers that the cluster remembers, in no order."""
    names = await persistently(lambda: context.store.get_children(context.paths.tiers, fresh=fresh))
    return [unescape(each) for each in names or ()]


@contextmanager
def looked_into(tier: str) -> Iterator[None]:
    """Tell why a tier must answer that is perhaps not the log's own, and what else helps."""
    try:
        yield
    except ObjectStoreError as error:
        raise ObjectStoreError(
            f"tier {tier} must be looked into, since it may have objects of this log: {error}; see "
            "dlog cluster tiers; once it is gone for good and no setting names it: dlog cluster "
            f"forget-tier {tier}",
            is_damaged=error.is_damaged,
        ) from error


async def delete_strays(context: LogContext, *, age_s: float) -> int:
    """Delete the objects that no ledger names and that are older than this; return how many.

    None is deleted after an import of metadata until an operator accepts it: ledgers that became
    cold after the export are only in objects, which the imported metadata does not name.
    """
    if await persistently(lambda: context.store.get(context.paths.restored, fresh=True)):
        return 0
    tiers = await tier_urls(context)
    count = 0
    troubles = Troubles()
    before_ms = context.clock.now_ms() - int(age_s * 1000)
    if not tiers:
        return 0
    from dlcore.ops.upkeep.table_guard import TableGuard  # it loads Arrow

    for tier in tiers:
        folder = f"{tier}/{context.cluster_id}"
        guard = TableGuard(context, folder, troubles)
        with troubles.isolated(f"stray objects below {folder}"):
            async with aclosing(context.cold.objects.list_below(folder)) as pages:
                async for page in pages:
                    old = [each.url for each in page if each.modified_ms < before_ms]
                    for start in range(0, len(old), _LEDGERS_AT_ONCE):
                        some = old[start : start + _LEDGERS_AT_ONCE]
                        count += await delete_unnamed(context, some, guard)
    return count


class Guard(Protocol):
    """Keeps objects that no ledger names."""

    async def keeps(self, url: str) -> bool:
        """Return whether an object must stay for now."""
        ...


async def delete_unnamed(context: LogContext, urls: Sequence[str], guard: Guard) -> int:
    """Delete those of some objects that no ledger names; return how many.

    The objects were listed before, so their ledgers are there, or never again.
    """
    names = [_NAME.fullmatch(url.rpartition("/")[2]) for url in urls]
    # Objects that dlog did not name are not dlog's.
    ours = [(url, name) for url, name in zip(urls, names, strict=True) if name is not None]
    paths = [context.paths.ledger(int(name["ledger"])) for _, name in ours]
    nodes = await persistently(lambda: context.store.get_many(paths, fresh=True)) if paths else []
    count = 0
    for (url, name), path, node in zip(ours, paths, nodes, strict=True):
        if _is_stray(url, name["token"], path, node) and not await guard.keeps(url):
            await context.cold.objects.delete(url)
            logger.info("deleted %s, which no ledger names", url)
            count += 1
    return count


def _is_stray(url: str, token: str, path: str, node: Versioned | None) -> bool:
    if node is None:
        return True
    damage: list[Exception] = []
    ledger = decode_or_tell(LedgerMetadata, node, source=path, tell=damage.append)
    if ledger is None:
        return False  # what a damaged ledger names is not known
    if ledger.token != token or not ledger.objects:
        return ledger.token != token  # without objects, they are being written
    folder, _, file = url.rpartition("/")
    return folder != ledger.folder or file not in {each.name for each in ledger.objects}
