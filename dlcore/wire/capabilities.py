"""Capabilities on the wire: the rights that each request needs, and their presentation before it.

Before a request the client presents a capability with these rights; the bookie checks them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, assert_never

from dlcore.base.access.capability import ID_MAX, Kept, LedgerRight, Reach, parse
from dlcore.wire.frames import FrameParts, FrameRun, ids_of_run
from dlcore.wire.messages import Follow, ReadEntries, ReadEntry, ReadHeld, ReadLac, WriteLac

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.access.capability import Purse
    from dlcore.wire.messages import Frame, Request


_IDS = struct.Struct(">8xqq")
"""Where an entry frame has the ids of its ledger and entry, see `dlcore.wire.frames`."""
_NO_ENTRY = (ID_MAX, -1)
# As plain numbers: a flag's own operators take ten times as long.
_READ = int(LedgerRight.READ)
_FENCE = int(LedgerRight.READ | LedgerRight.FENCE)
_ADD = int(LedgerRight.ADD)
_RECOVER = int(LedgerRight.ADD | LedgerRight.RECOVER)


def reach_of_add(frame: Frame, *, is_recovery: bool) -> Reach:
    """Return what an add of this frame touches; its ids are checked when it is stored."""
    ledger_id, entry_id = _ids_of(frame)
    return Reach(ledger_id, entry_id, entry_id, _RECOVER if is_recovery else _ADD)


def _ids_of(frame: Frame) -> tuple[int, int]:
    head = frame.parts[0] if isinstance(frame, FrameParts) else frame
    ledger_id, entry_id = _IDS.unpack_from(head)
    return ledger_id, entry_id


def reach_of_adds(frames: Sequence[Frame], *, is_recovery: bool) -> Reach | None:
    """Return what adds touch all together; None if they are of several ledgers."""
    if type(frames) is FrameRun:
        ledger_ids, entry_ids = ids_of_run(frames)
        ledger_id = int(ledger_ids[0])
        is_one = bool((ledger_ids == ledger_id).all())
        ends = int(entry_ids.min()), int(entry_ids.max())
    else:
        ledgers, entries = zip(*map(_ids_of, frames), strict=True)
        ledger_id = ledgers[0]
        is_one = ledgers.count(ledger_id) == len(ledgers)
        ends = min(entries), max(entries)
    return Reach(ledger_id, *ends, _RECOVER if is_recovery else _ADD) if is_one else None


def reach_of(request: Request) -> Reach:
    """Return what a request touches."""
    match request:
        case ReadEntries():
            ends = request.first_entry_id, request.last_entry_id
            return Reach(request.ledger_id, *ends, _READ)
        case ReadEntry(_, ledger_id, entry_id, fence):
            return Reach(ledger_id, entry_id, entry_id, _FENCE if fence else _READ)
        case Follow():
            return Reach(request.ledger_id, request.first_entry_id, ID_MAX, _READ)
        case ReadLac(_, ledger_id, fence):
            return Reach(ledger_id, *_NO_ENTRY, _FENCE if fence else _READ)
        case ReadHeld(_, ledger_id):
            return Reach(ledger_id, *_NO_ENTRY, _READ)
        case WriteLac(_, ledger_id, _):
            return Reach(ledger_id, *_NO_ENTRY, _ADD)
        case _:
            assert_never(request)


class Presenter:
    """Knows which capabilities the bookie keeps; each call returns those to send now.

    Args:
        purse: where they come from.
    """

    def __init__(self, purse: Purse) -> None:
        self._purse = purse
        self._presented = Kept()
        self._last = b""
        self._unsent: list[bytes] = []

    def before_read(self, request: Request) -> list[bytes]:
        """Present what a read needs."""
        if not self._present_for_all():
            self._present(reach_of(request))
        return self._take()

    def before_lac(self, ledger_id: int, last_add_confirmed: int) -> list[bytes]:
        """Present what an explicit LAC needs."""
        if not self._present_for_all():
            self._present(reach_of(WriteLac(0, ledger_id, last_add_confirmed)))
        return self._take()

    def before_adds(self, frames: Sequence[Frame], *, is_recovery: bool) -> list[bytes]:
        """Present what adds need."""
        if self._present_for_all():
            return self._take()
        # Most messages are of one ledger, and one capability has all of it.
        whole = reach_of_adds(frames, is_recovery=is_recovery)
        if whole is None or not self._present(whole):
            for frame in frames:
                self._present(reach_of_add(frame, is_recovery=is_recovery))
        return self._take()

    def _present(self, reach: Reach) -> bool:
        """Return whether the bookie has a capability for it now."""
        token = self._purse.token_for(reach)
        return token is not None and self._show(token)

    def renew(self) -> list[bytes]:
        """Present a new capability for connections that only follow a ledger."""
        self._present_for_all()
        return self._take()

    def _present_for_all(self) -> bool:
        token = self._purse.token_for_all()
        # By identity: this is asked for every request, and the same object comes until the token is
        # renewed.
        return token is not None and (token is self._last or self._show(token))

    def _show(self, token: bytes) -> bool:
        if self._presented.get(token) is None:
            self._presented.keep(token, parse(token))
            self._unsent.append(token)
        self._last = token
        return True

    def _take(self) -> list[bytes]:
        unsent, self._unsent = self._unsent, []
        return unsent
