"""Requests to the cluster: the bookies that it knows, and their entries of a ledger."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.background import together
from dlcore.base.errors import DLError, NoSuchLedgerError
from dlcore.ledger.metadata.values import BookieCookie
from dlcore.metadata.stored import decode_or_tell
from dlcore.ops.autorecovery.check import Answer, Held, Unknown

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlcore.backends.direct.ports import NamespacePorts
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import LedgerMetadata

logger = logging.getLogger(__name__)


async def read_cookies(context: NamespacePorts) -> list[BookieCookie]:
    """Return the cookie of every bookie that has one, by name; leave out damaged ones."""
    store, directory = context.store, context.paths.cookies
    paths = [f"{directory}/{name}" for name in await store.get_children(directory) or ()]
    tell = partial(logger.warning, "bookie left out, its cookie cannot be read: %s")
    cookies = (
        decode_or_tell(BookieCookie, node, source=path, tell=tell)
        for path, node in zip(paths, await store.get_many(paths), strict=True)
    )
    return list(filter(None, cookies))


def members_of(metadata: LedgerMetadata) -> set[BookieId]:
    """Return the bookies of all ensembles."""
    return {bookie for ensemble in metadata.ensembles for bookie in ensemble.bookies}


async def ask_replicas(
    context: NamespacePorts, metadata: LedgerMetadata, *, registered: Collection[BookieId]
) -> dict[BookieId, Answer]:
    """Return the answers of the ledger's members; bookies that are not registered are not asked."""
    members = sorted(members_of(metadata))
    answers = await together(
        *(
            ask_replica(context, each, metadata.ledger_id)
            if each in registered
            else _not_registered()
            for each in members
        )
    )
    return dict(zip(members, answers, strict=True))


async def ask_replica(context: NamespacePorts, bookie: BookieId, ledger_id: int) -> Answer:
    """Ask a bookie which entries of a ledger it holds.

    The whole list is in memory, 16 bytes for each range.  There is one range, unless the ledger is
    striped or entries are missing.  There are at most as many ranges as the bookie's share of the
    ledger has runs, one for each E entries.
    """
    try:
        return Held(await context.bookies.list_entries(bookie, ledger_id=ledger_id))
    except NoSuchLedgerError:
        return Held(())
    except DLError as error:
        return Unknown(str(error))


async def _not_registered() -> Answer:
    return Unknown("it is not registered")
