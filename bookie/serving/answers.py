"""Answers to adds, fences and LACs, collected until they are sent: many in one message."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dlcore.base.errors import DLError
from dlcore.wire.messages import DURABLE_IDS_MAX, Buffer, Failed, Pong, encode, encode_durable
from dlcore.wire.statuses import status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)


class Answers:
    """Settled requests of one connection that are not answered yet."""

    def __init__(self) -> None:
        self._durable: list[int] = []
        self._others: list[Failed | Pong] = []

    def note(self, request_ids: Sequence[int], error: BaseException | None) -> None:
        """Settle requests: all of them are durable, or all failed with `error`."""
        if error is None:
            # Durable adds need no detail: one message acknowledges thousands of them.
            self._durable += request_ids
        else:
            if not isinstance(error, DLError):
                logger.error("a request failed unexpectedly", exc_info=error)
            status = status_of(error)
            self._others += (Failed(request_id, *status) for request_id in request_ids)

    def note_alive(self, token: int) -> None:
        """Answer a keep-alive."""
        self._others.append(Pong(token))

    def take(self) -> list[Buffer]:
        """Return the messages to send, and clear them."""
        durable, self._durable = self._durable, []
        others, self._others = self._others, []
        buffers: list[Buffer] = [
            encode_durable(durable[at : at + DURABLE_IDS_MAX])
            for at in range(0, len(durable), DURABLE_IDS_MAX)
        ]
        for each in others:
            buffers += encode(each)
        return buffers
