"""Asking the cluster: which bookies it knows, and what they hold of a ledger."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dlcore.autorecovery.check import Answer, Held, Unknown
from dlcore.errors import CorruptMetadataError, DLError, NoSuchLedgerError
from dlcore.ledger.metadata.bookies import BookieCookie
from dlcore.metadata.stored import decode

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlcore.autorecovery.context import RecoveryContext
    from dlcore.ids import BookieId
    from dlcore.ledger.metadata.values import LedgerMetadata

logger = logging.getLogger(__name__)


async def known_bookies(context: RecoveryContext) -> list[BookieId]:
    """Return every bookie that has a cookie, in order."""
    store, directory = context.store, context.paths.cookies
    found: list[BookieId] = []
    for name in await store.get_children(directory) or ():
        path = f"{directory}/{name}"
        node = await store.get(path)
        if node is None:
            continue
        try:
            found.append(decode(BookieCookie, node.value, source=path).bookie)
        except CorruptMetadataError as error:
            logger.warning("bookie left out, its cookie cannot be read: %s", error)
    return found


def members_of(metadata: LedgerMetadata) -> set[BookieId]:
    """Return the bookies of all ensembles."""
    return {bookie for ensemble in metadata.ensembles for bookie in ensemble.bookies}


async def ask_replicas(
    context: RecoveryContext, metadata: LedgerMetadata, *, registered: Collection[BookieId]
) -> dict[BookieId, Answer]:
    """Return what each member of the ledger says it holds; who is not registered is not asked."""
    members = sorted(members_of(metadata))
    answers = await asyncio.gather(
        *(
            ask_replica(context, each, metadata.ledger_id)
            if each in registered
            else _not_registered()
            for each in members
        )
    )
    return dict(zip(members, answers, strict=True))


async def ask_replica(context: RecoveryContext, bookie: BookieId, ledger_id: int) -> Answer:
    """Return what a bookie says it holds of a ledger."""
    timeout_s = context.client_config.read_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            return Held(await context.bookies.list_entries(bookie, ledger_id=ledger_id))
    except NoSuchLedgerError:
        return Held(())
    except TimeoutError:
        return Unknown(f"no answer within {timeout_s} s")
    except DLError as error:
        return Unknown(str(error))


async def _not_registered() -> Answer:
    return Unknown("it is not registered")
