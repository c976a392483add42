"""Calls of Flight as they are seen above gRPC: messages in order both ways, an end, a cancellation.

A message that the network loses is sent again after a while, and what was behind it waits; some are
never made good, and neither side is reported.  Few messages wait to be taken.  A caller of a dead
process is refused, or hears nothing; so is a caller that was being served when it died.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc

from dlcore.base.errors import DLError, ProxyUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.simulation.clients import SimClient
    from tests.simulation.world import World

_AGAIN_S = 0.2
_STUCK_CHANCE = 0.1
_UNTAKEN_MAX = 2
_REFUSAL_CHANCE = 0.7
_KEEPALIVE_S = 5.0
"""After so long a proxy ends the call of a client that it cannot hear."""
_NO_MORE = grpc.aio.EOF


class Pipe:
    """The messages of a call in one direction."""

    def __init__(self, world: World, *, source: str, target: str) -> None:
        self._network = world.network
        self._rng = world.rng
        self._loop = world.loop
        self._source = source
        self._target = target
        self._sent = 0
        self._expected = 0
        self._untaken = 0
        self._early: dict[int, Any] = {}
        self._arrived: deque[Any] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._is_broken = False

    async def room(self) -> None:
        """Wait until few messages wait to be taken."""
        while self._untaken >= _UNTAKEN_MAX:
            self._room.clear()
            await self._room.wait()

    def send(self, message: Any) -> None:
        """Send a message."""
        number = self._sent
        self._sent += 1
        self._untaken += 1
        if self._network.is_held(self._source):
            self._network.hold(self._source, lambda: self._travel(number, message))
        else:
            self._travel(number, message)

    def _travel(self, number: int, message: Any) -> None:
        if not self._network.loses(self._source, self._target):
            self._network.carry(self._source, self._target, lambda: self._arrive(number, message))
        elif self._rng.random() >= _STUCK_CHANCE:
            self._loop.call_later(_AGAIN_S, self._travel, number, message)

    def _arrive(self, number: int, message: Any) -> None:
        self._early[number] = message
        while self._expected in self._early:
            self._arrived.append(self._early.pop(self._expected))
            self._expected += 1
        self._news.set()

    def break_off(self) -> None:
        """Let nothing more arrive, and say so to waiting callers."""
        self._is_broken = True
        self._news.set()

    async def take(self) -> Any:
        """Return the next message.  Raises: ProxyUnavailableError: it was broken off."""
        while not self._arrived:
            if self._is_broken:
                raise ProxyUnavailableError("the connection is broken")
            self._news.clear()
            await self._news.wait()
        self._untaken -= 1
        self._room.set()
        return self._arrived.popleft()


class Context:
    """A call as its handler sees it: what is used of gRPC's.  `on_read` is called at each read."""

    def __init__(self, caller: str, requests: Pipe, answers: Pipe) -> None:
        self._caller = caller
        self._requests = requests
        self._answers = answers
        self.on_read: Callable[[], None] = lambda: None
        self._is_over = False

    async def read(self) -> Any:
        """Return the next message, or what is none once the client has sent all."""
        self.on_read()
        if not self._is_over:
            message = await self._requests.take()
            self._is_over = message is _NO_MORE
            if not self._is_over:
                return message
        return _NO_MORE

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return the caller: each has a certificate of its name."""
        return {"x509_common_name": [self._caller.encode()]}

    def peer(self) -> str:
        """Return where the call comes from: all are of one host here."""
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what the call says beside its messages: no one asks to be forwarded here."""
        return ()

    async def write(self, message: Any) -> None:
        """Send a message to the client."""
        await self._answers.room()
        self._answers.send(message)


class End:
    """The status of a call; of a good one there is no error."""

    def __init__(self, error: DLError | None) -> None:
        self.error = error


class Call:
    """One call by `caller` to the process `callee`, which `serve` answers there."""

    def __init__(
        self,
        world: World,
        caller: str,
        callee: SimClient,
        serve: Callable[[Context], Awaitable[None]],
    ) -> None:
        self._world = world
        self._caller = caller
        self._callee = callee
        self._serve = serve
        self._requests = Pipe(world, source=caller, target=callee.name)
        self._answers = Pipe(world, source=callee.name, target=caller)
        self._handler: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self.has_sent_all = False
        if callee.is_alive:
            self._reach(self._begin)
        else:
            self._refuse()

    def _reach(self, action: Callable[[], None]) -> None:
        """Do something at the callee, when and if it can be reached."""
        network, link = self._world.network, (self._caller, self._callee.name)
        if network.is_held(self._caller):
            network.hold(self._caller, lambda: self._reach(action))
        elif not network.loses(*link):
            network.carry(*link, action)
        elif self._world.rng.random() >= _STUCK_CHANCE:
            self._world.loop.call_later(_AGAIN_S, self._reach, action)

    def _refuse(self) -> None:
        if self._world.rng.random() < _REFUSAL_CHANCE:
            self._world.loop.call_later(0.002, self._answers.break_off)

    def _begin(self) -> None:
        if not self._is_cancelled:
            self._handler = self._world.spawn(self._handle(), client=self._callee)

    async def _handle(self) -> None:
        error: DLError | None = None
        try:
            await self._serve(Context(self._caller, self._requests, self._answers))
        except DLError as refused:
            error = refused
        except asyncio.CancelledError:
            if not self._callee.is_alive:
                self._refuse()
            raise
        self._answers.send(End(error))

    async def room(self) -> None:
        """Wait until few messages wait to be taken."""
        await self._requests.room()

    def send(self, message: Any) -> None:
        """Send a message."""
        assert not self.has_sent_all
        self._requests.send(message)

    def done_writing(self) -> None:
        """Say that no message follows.  Idempotent."""
        if not self.has_sent_all:
            self.has_sent_all = True
            self._requests.send(_NO_MORE)

    async def take(self) -> Any:
        """Return the next message, or the call's `End`.

        Raises: ProxyUnavailableError: the connection is broken.
        """
        return await self._answers.take()

    def cancel(self) -> None:
        """End the call; the proxy learns of it, if only by hearing nothing.  Idempotent."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._reach(self._end)
            self._world.loop.call_later(_KEEPALIVE_S, self._end)

    def _end(self) -> None:
        if self._handler is not None:
            self._handler.cancel()
