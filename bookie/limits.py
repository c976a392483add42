"""What ids a bookie takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.errors import BadRequestError
from dlcore.ids import INVALID_ENTRY_ID

if TYPE_CHECKING:
    from dlcore.ledger.digest import EntryFrame

_ID_MAX = 2**63 - 1


def check_id(kind: str, value: int) -> None:
    """Raise `BadRequestError` for a ledger or entry id out of range; `kind` says which."""
    if not 0 <= value <= _ID_MAX:
        raise BadRequestError(f"{kind} id {value}: expected 0 … {_ID_MAX}")


def check_frame(entry: EntryFrame) -> None:
    """Raise `BadRequestError` for a frame whose ids make no sense."""
    check_id("ledger", entry.ledger_id)
    check_id("entry", entry.entry_id)
    if not INVALID_ENTRY_ID <= entry.last_add_confirmed < entry.entry_id:
        raise BadRequestError(
            f"entry {entry.ledger_id}:{entry.entry_id} says the last add confirmed is "
            f"{entry.last_add_confirmed}, expected -1 … {entry.entry_id - 1}"
        )
