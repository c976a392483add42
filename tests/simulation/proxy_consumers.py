"""Subscribers over proxies: the real client, above gRPC, on the calls of the simulation.

Several consumers read for one subscriber of each log: they take the subscription from each other,
read, and commit.  Their proxies die and pause, answers are lost, and requests are carried out late
and twice; they stop waiting for a commit, die, and come back.  Two logs change their names
meanwhile, so that one who knows a log by its name alone would meet the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import grpc
import pyarrow as pa

from dlcore.errors import (
    AlreadyTruncatedError,
    DLError,
    EndOfStreamError,
    LogExistsError,
    LogNotFoundError,
    ProxyUnavailableError,
    SubscriptionMovedError,
)
from dlcore.ids import DLSN
from dlcore.log.metadata.values import LogKey
from dlcore.proto import flight_pb2 as pb
from dlcore.proxy.flight.statuses import code_of, message_of, metadata_of
from dlcore.remote import endpoint
from dlcore.remote.endpoint import Endpoint
from dlcore.remote.log import RemoteLog
from dlcore.remote.planning import get_info
from tests.simulation.calls import End
from tests.simulation.proxy_clients import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from dlcore.remote.reader import RemoteReader
    from tests.simulation.calls import Call
    from tests.simulation.log_process import LogProcess
    from tests.simulation.logs import Logs
    from tests.simulation.proxies import Proxies
    from tests.simulation.subscription_checkers import Consuming

SUBSCRIBER = "sub"
_SHIFTED = ("s", "t", "u")
"""The names of two logs."""
_BROKEN_CHANCE = 0.05
"""How often an answer is lost."""
_AGAIN_CHANCE = 0.1
"""How often an action is carried out again, some time later."""
_LATE_S_MAX = 4.0
_QUIET_S = 20.0
"""A stream that says nothing for so long is broken."""
_DEATH_CHANCE = 0.1
_WAITS_S = (0.005, 0.1, 60.0)
"""For so long a commit is waited for."""


class Calls(Endpoint):
    """The real endpoint, of somebody whose calls are those of the simulation."""

    def __init__(self, proxies: Proxies, name: str) -> None:
        self._proxies = proxies
        self._name = name
        locations = proxies.locations()
        if not locations:
            raise ProxyUnavailableError("nobody serves yet")
        proxies.rng.shuffle(locations)
        addresses = ",".join(each.removeprefix("grpc://") for each in locations)
        with patch.object(endpoint, "open_channels", lambda *_: locations):
            super().__init__(f"grpc://{addresses}", patience_s=2 * PATIENCE_S)

    def _call(
        self,
        location: str | None,
        kind: str,
        method: str,
        *request: bytes,
        within_s: float | None = None,  # which `_Answers` has itself
    ) -> Any:
        at: Any = location or self._channels[self._turn]
        return _Answers(self._proxies, partial(self._begin, at, method, *request), method)

    def _begin(self, location: str, method: str, request: bytes) -> Call:
        proxy = self._proxies.at(location)
        if method == "GetFlightInfo":
            return proxy.get_info(self._name, request)
        if method == "DoGet":
            return proxy.get(self._name, pb.Ticket.FromString(request).ticket)
        action = pb.Action.FromString(request)
        rng = self._proxies.rng
        if rng.random() < _AGAIN_CHANCE:
            again = partial(proxy.ask, self._name, action.type, action.body)
            self._proxies.later(rng.uniform(0.0, _LATE_S_MAX), again)
        return proxy.ask(self._name, action.type, action.body)

    async def explained(self, error: DLError, turn: int) -> DLError:
        """Return the error: there is no TLS."""
        return error

    async def aclose(self) -> None:
        """Let no call begin any more."""
        self._closed = True


class _Answers:
    """A call as the real endpoint sees it: what is used of gRPC's."""

    def __init__(self, proxies: Proxies, begin: partial[Call], method: str) -> None:
        self._proxies = proxies
        self._encode = _result if method == "DoAction" else bytes
        self._silence_s = _QUIET_S if method == "DoGet" else PATIENCE_S
        self._begin = begin
        self._call: Call | None = None

    def __await__(self) -> Generator[Any, None, bytes]:
        return self._first().__await__()

    async def _first(self) -> bytes:
        async with contextlib.aclosing(aiter(self)) as answers:
            return await anext(answers)

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        try:
            self._call = call = self._begin()
            while True:
                message = await asyncio.wait_for(call.take(), self._silence_s)
                if not self._proxies.is_ending and self._proxies.rng.random() < _BROKEN_CHANCE:
                    raise ProxyUnavailableError("the answer is lost")
                if not isinstance(message, End):
                    yield self._encode(message)
                elif message.error is None:
                    return
                else:
                    raise message.error
        except (DLError, TimeoutError) as error:
            told = error if isinstance(error, DLError) else ProxyUnavailableError("it is silent")
            raise grpc.aio.AioRpcError(
                grpc.StatusCode[code_of(told)],
                grpc.aio.Metadata(),
                grpc.aio.Metadata(*metadata_of(told)),
                details=message_of(told),
            ) from error

    def cancel(self) -> None:
        """End the call."""
        if self._call is not None:
            self._call.cancel()


def _result(body: bytes) -> bytes:
    return pb.Result(body=body).SerializeToString()


class Consumer:
    """Reads for the subscriber of some log from where he was, as one holder after the other."""

    def __init__(self, proxies: Proxies, name: str, logs: Sequence[str], *, is_last: bool) -> None:
        self.name = name
        self._is_last = is_last
        self._proxies = proxies
        self._rng = proxies.rng
        self._names = (*logs, *_SHIFTED)
        self._known: list[LogKey] = []  # under the names that they had
        self._asked = DLSN.INITIAL  # to be stored last
        self._logs = proxies.log_checkers
        self._checkers = proxies.checkers.subscriptions

    async def run(self) -> None:
        """Consume, until the end is near; then the last one consumes all that there is."""
        while not self._proxies.is_ending:
            if self._known and self._rng.random() < 0.7:
                await self._try(self._rng.choice(self._known), until_caught_up=False)
            else:
                await self._try(self._rng.choice(self._names), until_caught_up=False)
            await asyncio.sleep(self._rng.expovariate(3.0))
        left = [*self._names] if self._is_last else []
        while left:
            if await self._try(left[-1], until_caught_up=True):
                left.pop()
            await asyncio.sleep(self._rng.expovariate(3.0))

    async def _try(self, log: str | LogKey, *, until_caught_up: bool) -> bool:
        """Consume of a log; return whether that came to its end, or there is no such log."""
        try:
            async with Calls(self._proxies, self.name) as calls:
                if isinstance(log, str):
                    log = LogKey(name=log, log_id=(await get_info(calls, log)).log_id)
                    self._known.append(log)
                remote = RemoteLog(calls, log)
                if not until_caught_up and self._rng.random() < 0.05:
                    await remote.delete_subscription(SUBSCRIBER)
                return await self._consume(remote, until_caught_up=until_caught_up)
        except LogNotFoundError:
            return True
        except DLError as error:
            self._proxies.note(self.name, f"{type(error).__name__}: {error}")
            return False

    async def _consume(self, log: RemoteLog, *, until_caught_up: bool) -> bool:
        first: DLSN | None = None
        try:
            reader = await log.open_reader(subscriber=SUBSCRIBER)
        except AlreadyTruncatedError:
            info = await log.get_info()
            first = DLSN.parse(info.first or info.end)
            reader = await log.open_reader(subscriber=SUBSCRIBER, dlsn=first)
        hold: Any = reader._hold
        # Who begins at the very first position reads whatever is there.
        begins = (first or hold.position) == DLSN.INITIAL
        consuming = self._checkers.new_holder(
            log.log_id,
            SUBSCRIBER,
            hold._token,
            hold.position,
            DLSN.INITIAL if begins else reader.position,
        )
        self._asked = hold.position
        try:
            return await self._read(reader, consuming, until_caught_up=until_caught_up)
        except SubscriptionMovedError:
            consuming.on_moved()
            self._proxies.count("subscription taken")
            raise
        finally:
            await reader.aclose()

    async def _read(
        self, reader: RemoteReader, consuming: Consuming, *, until_caught_up: bool
    ) -> bool:
        rng = self._rng
        turns = 1_000_000 if until_caught_up else rng.randint(1, 5)
        for _ in range(turns):
            timeout_s = None if until_caught_up else rng.choice((0.0, 0.1, 0.5))
            try:
                records = await reader.read_bulk(
                    rng.choice((1, 3, 20)), until_caught_up=until_caught_up, timeout_s=timeout_s
                )
            except AlreadyTruncatedError:
                consuming.reading.on_truncated()
                return False
            except EndOfStreamError:
                return True
            consuming.on_records(records)
            if rng.random() < _DEATH_CHANCE and not until_caught_up:
                self._proxies.note(self.name, "dies")
                return False
            if rng.random() < 0.7 or (until_caught_up and not records):
                await self._commit(reader, consuming, is_patient=until_caught_up)
            if until_caught_up and not records:
                return True
            if not until_caught_up:
                await asyncio.sleep(rng.expovariate(3.0))
        return True

    async def _commit(
        self, reader: RemoteReader, consuming: Consuming, *, is_patient: bool
    ) -> None:
        """Commit what was read, or part of it; wait for that, or not for long."""
        position, wait_s = reader.position, _WAITS_S[-1]
        if not is_patient:
            left = [each for each in consuming.got if each >= self._asked]
            position = self._rng.choice((position, self._asked, *left))
            wait_s = self._rng.choice(_WAITS_S)
        self._asked = position
        consuming.on_ask(position)
        try:
            async with asyncio.timeout(wait_s):
                await reader.commit(position)
        except TimeoutError:
            self._proxies.note(self.name, "does not wait for its commit")
            self._proxies.count("commit given up")
            return
        consuming.on_stored(position)
        self._proxies.count("commit over proxies")


async def shift_names(logs: Logs, process: LogProcess) -> None:
    """Write to one of two logs, or give it the name that is free, which the other one had."""
    rng, checkers = logs.world.rng, logs.world.log_checkers
    await logs.sleep(rng.uniform(0.0, 0.5))
    names = [name for name in _SHIFTED if name in checkers.life.names]
    if len(names) < len(_SHIFTED) - 1:
        await logs.create_again(process.namespace, rng.choice(_SHIFTED))
        return
    log = await process.namespace.open_log(rng.choice(names), config=process.config)
    if rng.random() < 0.5:
        free = [name for name in _SHIFTED if name not in names]
        with contextlib.suppress(LogExistsError):
            await log.rename(rng.choice(free or names))
        return
    writing = checkers.new_writing(log.log_id, log.name)
    first = rng.getrandbits(40)
    payloads = [f"shifter/{first + number}/0".encode() for number in range(rng.randint(1, 5))]
    async with await log.open_writer() as writer:
        writing.on_write(payloads)
        written = writer.write_batch(pa.record_batch({"value": payloads}))
        writing.on_acknowledged(payloads, await written)
