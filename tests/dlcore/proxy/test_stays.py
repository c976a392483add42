"""The end of a stream while a message is on its way, which no status can overtake."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from dlcore.base.access.rights import ANONYMOUS, Caller
from dlcore.base.errors import AccessDeniedError
from dlcore.flight import calls
from dlcore.proxy import callers
from dlcore.proxy.callers import Stay
from tests.fixtures.aio import run

LOST = AccessDeniedError("no rule allows it")


def test_the_end_waits_for_the_message_on_its_way() -> None:
    """A task that is cancelled while gRPC sends could not send the status."""

    async def scenario() -> None:
        stay, sent = Stay(Caller(ANONYMOUS, "here"), "peer"), asyncio.Event()
        begun: list[object] = []

        async def send(message: object) -> None:
            begun.append(message)
            stay.end(LOST)
            await sent.wait()
            begun.append("sent")

        asyncio.get_running_loop().call_later(0.05, sent.set)
        with pytest.raises(AccessDeniedError), stay.ending_block():
            await stay.send(send, "message")
        assert begun == ["message", "sent"]
        stay.close()

    run(scenario())


def test_a_message_that_no_client_takes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads nothing does not keep its stream by that."""
    monkeypatch.setattr(callers, "_SENDING_S", 0.01)

    async def scenario() -> None:
        stay = Stay(Caller(ANONYMOUS, "here"), "peer")

        async def send(_: object) -> None:
            stay.end(LOST)
            await asyncio.Event().wait()

        with pytest.raises(AccessDeniedError), stay.ending_block():
            await stay.send(send, "message")
        stay.close()

    run(scenario())


def test_a_status_that_cannot_be_sent_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the client would wait for ever."""
    closed: list[object] = []
    monkeypatch.setattr(calls, "close_connection", closed.append)

    class Sending:
        async def abort(self, *_: object, **__: object) -> None:
            raise grpc.aio.InternalError("too many operations")

    async def scenario() -> None:
        context = Sending()
        with pytest.raises(asyncio.CancelledError):
            await calls.abort(cast("Any", context), grpc.StatusCode.UNAVAILABLE, "later")
        assert closed == [context]

    run(scenario())
