"""Clients of proxies whose appends are whole: those to several logs, and those on a condition.

They know locations, and nothing else of the cluster.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec

from dlcore.base.errors import DLError, ProxyUnavailableError
from dlcore.base.ids import DLSN
from dlcore.flight.actions import AppendRequest
from dlcore.log.metadata.commits import SharedStaging
from dlcore.log.metadata.segment import StagedExtent
from tests.simulation.calls import End
from tests.simulation.proxy_clients import (
    PATIENCE_S,
    QUIET_S,
    Producer,
    first_message,
    payload_message,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.errors import ConditionFailedError
    from tests.simulation.calls import Call
    from tests.simulation.log_checkers import Rows
    from tests.simulation.proxies import Proxies, Proxy
    from tests.simulation.proxy_checkers import Stream

_ROWS_MAX = 6
_BATCH_MAX = 4
_BATCHES_MAX = 40
_STREAMS = (1, 2)
_ATTEMPTS = (1, 2, 5)
_DEATH_CHANCE = 0.03


class Conditional(Producer):
    """Writes batches to one log, each behind the record that it believes to be the last one."""

    _last: DLSN | None = None
    _asked: DLSN | None = None
    _batches = 0

    def _command(self) -> dict[str, object]:
        self._asked = self._last
        return {"expected": None if self._last is None else str(self._last)}

    def _on_refused(self, stream: Stream, error: ConditionFailedError) -> None:
        """Go on behind the record that is the last one."""
        self._last = None if error.last is None else DLSN.parse(error.last)
        stream.on_refused(self._last)
        self._proxies.count("condition that failed")

    async def _send_all(self, call: Call, stream: Stream, hearing: asyncio.Future[End]) -> None:
        """Send one batch, the one that waits if there is one; then say that this is all."""
        if not (self._waiting or self._proxies.is_ending or self._batches == _BATCHES_MAX):
            fresh = self._rng.randint(1, _BATCH_MAX)
            self._waiting |= dict.fromkeys(range(self._count, self._count + fresh))
            self._count += fresh
            self._batches += 1
        if self._waiting and not hearing.done():
            stream.expect(self._asked)
            self._send(call, stream, list(self._waiting))
        if self._rng.random() < 0.1:
            await asyncio.sleep(self._rng.uniform(0.0, 2 * PATIENCE_S))
        call.done_writing()

    def _on_acknowledged(self, dlsn: DLSN | None) -> None:
        self._last = dlsn or self._last
        self._proxies.count("conditional append")


class Stager:
    """Appends to several logs at once, one version after the other.

    It stages at some proxies and asks others to commit, until it learns what became of that.  It
    may die at any step: then another one appends the same, and knows nothing of what was staged.
    """

    def __init__(self, proxies: Proxies, name: str, logs: Sequence[str]) -> None:
        self.name = name
        self._proxies = proxies
        self._rng = proxies.rng
        self._logs = logs
        self._checkers = proxies.log_checkers
        self._version = 0
        self._tokens = 0
        self._rows: Rows = {}
        self._shared = f"{name}-tasks" if proxies.rng.random() < 0.4 else None

    async def run(self) -> None:
        """Append, until the end is near and what was begun is there, or it dies then."""
        while not self._proxies.is_ending or self._rows:
            self._rows = self._rows or self._some_rows()
            try:
                await self._append()
            except (DLError, TimeoutError) as error:
                self._proxies.note(self.name, f"{type(error).__name__}: {error}")
            if self._proxies.is_ending and self._rng.random() < 0.2:
                return
            await asyncio.sleep(self._rng.expovariate(3.0))

    def _some_rows(self) -> Rows:
        names = self._rng.sample(self._logs, self._rng.randint(1, len(self._logs)))
        return {
            name: [
                f"{self.name}/{self._version}/{name}/{row}".encode()
                for row in range(self._rng.randint(1, _ROWS_MAX))
            ]
            for name in sorted(names)
        }

    async def _append(self) -> None:
        append = (self.name, self._version)
        self._checkers.on_append(append, self._rows)
        self._tokens += 1
        token, streams = f"{self.name}-{self._tokens}", self._rng.choice(_STREAMS)
        extents: list[StagedExtent] = []
        for number in range(streams):
            extents += await self._stage(
                {log: _part(payloads, number, streams) for log, payloads in self._rows.items()}
            )
        shared = self._shared and SharedStaging(identity=self._shared, round=str(self._version))
        request = AppendRequest(
            identity=self.name,
            version=self._version,
            token=token,
            extents=extents,
            shared=shared or None,
        )
        self._checkers.on_commit(append, sorted({(each.log, each.log_id) for each in extents}))
        if not await self._commit(request):
            return
        self._checkers.on_committed(append, {})
        self._proxies.count("append through proxies")
        self._rows = {}
        self._version += 1

    async def _stage(self, rows: Rows) -> list[StagedExtent]:
        """Send rows to some proxy; return what it says that it staged."""
        command: dict[str, object] = {"staging": self._shared or self.name}
        if self._shared is not None:
            command["shared"] = True
        call = self._some_proxy().put(self.name)
        try:
            call.send(first_message(command))
            await self._reply(call)
            for row in range(_ROWS_MAX):
                if self._rng.random() < _DEATH_CHANCE:
                    raise ProxyUnavailableError("died while it staged")
                for log, payloads in rows.items():
                    if payloads[row : row + 1]:
                        await asyncio.wait_for(call.room(), PATIENCE_S)
                        call.send(payload_message(payloads[row : row + 1], {"log": log}))
            call.done_writing()
            reply = await self._reply(call)
            if "refused" in reply:
                await self._reply(call)
            return msgspec.convert(reply["staged"], list[StagedExtent])
        finally:
            call.cancel()

    async def _commit(self, request: AppendRequest) -> bool:
        """Ask proxies to commit; return whether one says that it is there."""
        for _ in range(self._rng.choice(_ATTEMPTS)):
            try:
                await self._ask("commit_append", request)
            except (ProxyUnavailableError, TimeoutError) as error:
                self._proxies.note(self.name, f"asks again: {type(error).__name__}: {error}")
                await asyncio.sleep(self._rng.expovariate(5.0))
            else:
                return True
        if self._rng.random() < 0.3:
            await self._ask("abort_append", request)
        return False

    async def _ask(self, action: str, request: AppendRequest) -> dict[str, Any]:
        call = self._some_proxy().ask(self.name, action, msgspec.json.encode(request))
        try:
            return await self._reply(call)
        finally:
            call.cancel()

    async def _reply(self, call: Call) -> dict[str, Any]:
        """Return what a proxy says next.  Raises: why it says no more; TimeoutError."""
        # It gives up early, so that others append meanwhile; in the end it has to come to its end.
        patience_s = QUIET_S if self._proxies.is_ending else PATIENCE_S
        message = await asyncio.wait_for(call.take(), patience_s)
        if isinstance(message, End):
            raise message.error or ProxyUnavailableError("the call ended without an answer")
        reply: dict[str, Any] = json.loads(getattr(message, "app_metadata", message))
        return reply

    def _some_proxy(self) -> Proxy:
        return self._proxies.at(self._proxies.some_location())


def _part(payloads: list[bytes], number: int, count: int) -> list[bytes]:
    """Return one of so many parts, which follow each other."""
    return payloads[len(payloads) * number // count : len(payloads) * (number + 1) // count]
