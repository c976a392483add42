"""Limits of the ids that a bookie takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlcore.errors import BadRequestError
from dlcore.ids import INVALID_ENTRY_ID

if TYPE_CHECKING:
    from bookie.config import StorageConfig
    from bookie.ledger_state import LedgerState
    from dlcore.wire.digest import EntryFrame, FollowingFrames
    from dlcore.wire.frames import FrameRun

_ID_MAX = 2**63 - 1


def check_id(kind: str, value: int) -> None:
    """Raise `BadRequestError` for a ledger or entry id out of range; `kind` says which."""
    if not 0 <= value <= _ID_MAX:
        raise BadRequestError(f"{kind} id {value}: expected 0 … {_ID_MAX}")


def check_range(first_entry_id: int, last_entry_id: int, *, stride: int, bytes_max: int) -> range:
    """Return the entries that a read of a range asks for, or raise `BadRequestError`."""
    check_id("entry", first_entry_id)
    check_id("entry", last_entry_id)
    if stride < 1 or bytes_max < 1 or last_entry_id < first_entry_id:
        raise BadRequestError(
            f"entries {first_entry_id} to {last_entry_id}, stride={stride} "
            f"bytes_max={bytes_max}: expected first <= last, and both >= 1"
        )
    return range(first_entry_id, last_entry_id + 1, stride)


def check_frame(entry: EntryFrame) -> None:
    """Raise `BadRequestError` for a frame whose ids make no sense."""
    check_id("ledger", entry.ledger_id)
    check_id("entry", entry.entry_id)
    if not INVALID_ENTRY_ID <= entry.last_add_confirmed < entry.entry_id:
        raise BadRequestError(
            f"entry {entry.ledger_id}:{entry.entry_id} says the last add confirmed is "
            f"{entry.last_add_confirmed}, expected -1 … {entry.entry_id - 1}"
        )


def may_add_run(
    run: FrameRun, what: FollowingFrames, state: LedgerState, config: StorageConfig
) -> bool:
    """Return whether frames of a ledger that is known may be taken all together.

    Each must make sense and be of an entry that cannot be held, and nothing may be against them.
    """
    entry_ids = np.arange(what.first_entry_id, what.first_entry_id + len(run))
    return bool(
        state.accepts(is_recovery=False)
        and not state.is_deleted
        and what.first_entry_id > state.last_entry_id
        and run.sizes.max() <= config.entry_size_bytes_max
        and what.ledger_id >= 0
        and (what.last_add_confirmed >= INVALID_ENTRY_ID).all()
        and (what.last_add_confirmed < entry_ids).all()
    )
