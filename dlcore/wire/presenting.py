"""Presents capabilities on one connection, before the requests that need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.access.capability import parse
from dlcore.base.access.holding import Kept
from dlcore.wire.messages import WriteLac
from dlcore.wire.reaches import reach_of, reach_of_add, reach_of_adds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.access.capability import Reach
    from dlcore.base.access.holding import Purse
    from dlcore.wire.client_end import Read
    from dlcore.wire.messages import Frame


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

    def before_read(self, request: Read) -> list[bytes]:
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
        """Present a new capability for those that follow a ledger, and ask for nothing else."""
        self._present_for_all()
        return self._take()

    def _present_for_all(self) -> bool:
        token = self._purse.token_for_all()
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
