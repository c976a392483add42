"""Endings of the parts of a bookie process that is dead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import DLError

if TYPE_CHECKING:
    from bookie.ledger_storage import LedgerStorage
    from bookie.membership.registration_driver import Registrar


async def bury(storage: LedgerStorage) -> None:
    """Stop the tasks of a storage whose process is dead; its disk refuses everything."""
    try:
        await storage.aclose()
    except DLError:
        return


def kill(registrar: Registrar) -> None:
    """End a registrar whose process is dead: nothing is unregistered."""
    for unsubscribe in registrar._unsubscribe:
        unsubscribe()
    registrar._tasks.cancel()
