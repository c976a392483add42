"""Bugs of those who write over proxies by the real client, put back on purpose."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from dlcore.flight.producer_client import Outbox, ProducerClient
from dlcore.log.proxied.producers import Producers

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def each_stream_is_of_a_new_incarnation() -> Iterator[None]:
    """Messages sent on the stream before are numbered anew, and therefore written again."""
    begin = ProducerClient._open

    def anew(self: ProducerClient[Any], now: float) -> Any:
        self.identity.claim = None
        return begin(self, now)

    with (
        patch.object(ProducerClient, "_open", anew),
        patch.object(Outbox, "begin", _number_from),
    ):
        yield


def _number_from(self: Outbox[Any], sequence: int) -> None:
    self._sent = self._doubted = self.sent_bytes = 0
    for message in self._messages:
        message.first = sequence
        sequence += message.batch.num_rows
    self._next_sequence = sequence


@contextlib.contextmanager
def producers_are_forgotten_at_once() -> Iterator[None]:
    """The next snapshot of producers in the log has only those that write just then."""

    def forget(self: Producers[Any], _: int) -> None:
        for each in list(self._known.values()):
            if each.durable == each.accepted:
                self._forget(each)

    with patch.object(Producers, "_forget_old", forget):
        yield


MUTANTS = (
    each_stream_is_of_a_new_incarnation,
    producers_are_forgotten_at_once,
)
