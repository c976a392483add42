"""Bugs of the wire, put back on purpose: answers, handshakes, windows, silence, lost connections.

Some others are masked here, since ledger clients make good what one bookie leaves out: an update
lost at the edge of a chunk (`mutants_tested_bookie`), a short read taken as a frame
(`mutants_tested_wire`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING
from unittest.mock import patch

from bookie.serving import session as session_module
from bookie.serving.connection import WritesInFlight
from dlcore.base.errors import DLError, NoSuchEntryError
from dlcore.wire.bookie_end import Greeting
from dlcore.wire.receiving import Keepalive
from dlcore.wire.session import ClientEnd, ClientSession, EndRead, Stored, Welcomed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from dlcore.wire.messages import Hello, Welcome
    from dlcore.wire.session import Effect


@contextlib.contextmanager
def answers_go_to_the_wrong_request() -> Iterator[None]:
    """The last sent entry is taken for durable."""

    def store(self: ClientEnd[Any, Any], request_ids: Sequence[int]) -> Stored[Any]:
        return Stored([self.writes.popitem()[1] for _ in request_ids if self.writes])

    with patch.object(ClientEnd, "_store", store):
        yield


@contextlib.contextmanager
def adds_are_acknowledged_on_arrival() -> Iterator[None]:
    """A bookie answers when it has taken an add, and not when that is durable."""

    def fly(
        self: WritesInFlight, ids: Sequence[int], size: int, future: asyncio.Future[None]
    ) -> None:
        future.add_done_callback(lambda done: done.exception())
        stored = session_module.Stored([session_module.Outcome(ids, size)])
        asyncio.get_running_loop().call_soon(self._tell, stored)

    with patch.object(WritesInFlight, "_fly", fly):
        yield


@contextlib.contextmanager
def windows_are_not_given_back() -> Iterator[None]:
    """A range read that is longer than its window never ends."""
    with patch.object(ClientEnd, "take", lambda *_: []):
        yield


@contextlib.contextmanager
def handshakes_are_not_checked() -> Iterator[None]:
    """Any server that answers at the address counts as the bookie that is meant."""

    def enter(self: Greeting, _: Hello) -> None:
        self.is_over = True

    def welcome(self: ClientEnd[Any, Any], _: Welcome) -> Welcomed:
        self._is_welcome = True
        return Welcomed()

    with patch.object(Greeting, "enter", enter), patch.object(ClientEnd, "_enter", welcome):
        yield


@contextlib.contextmanager
def half_open_connections_are_not_noticed() -> Iterator[None]:
    """No one asks a silent peer whether it lives."""
    with patch.object(Keepalive, "check", lambda *_: None):
        yield


@contextlib.contextmanager
def a_lost_connection_is_a_no() -> Iterator[None]:
    """Entries unanswered when the connection broke count as not held."""

    def end_all(self: ClientSession[Any], error: DLError) -> list[Effect[Any]]:
        denied = NoSuchEntryError("the connection broke")
        return [
            EndRead(each.read, denied) if isinstance(each, EndRead) else each
            for each in original(self, error)
        ]

    original = ClientSession._end_all
    with patch.object(ClientSession, "_end_all", end_all):
        yield


MUTANTS = (
    a_lost_connection_is_a_no,
    adds_are_acknowledged_on_arrival,
    answers_go_to_the_wrong_request,
    half_open_connections_are_not_noticed,
    handshakes_are_not_checked,
    windows_are_not_given_back,
)
