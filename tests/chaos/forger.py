"""A stranger that reaches one bookie: made-up LACs and entries, and bytes that mean nothing.

It knows the ledgers that are open, for it reads the metadata, and no writer's secrets, for there
are none: what it forges looks right to the bookie.  It does not know how many bytes a ledger has,
so its entries do not count on from those before them.  They are entries that the bookie holds, with
other bytes, and entries far behind the last one.

Not those that the writer is about to add: a bookie keeps the first bytes that it gets for an entry.
It would refuse the writer's own, which ends the writer, and where two others have acknowledged the
entry by then, readers who ask this bookie are given the forged one.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from dlcore.base.errors import DLError
from dlcore.ops.sandbox.process import HOST
from dlcore.wire.frames import encode_frame
from dlcore.wire.messages import (
    FEATURES,
    PROTOCOL_VERSION,
    Add,
    Hello,
    Lac,
    ReadLac,
    WriteLac,
    encode,
)
from tests.fixtures.raw_wire import RawEnd

if TYPE_CHECKING:
    import random
    import ssl
    from collections.abc import Sequence

    from dlcore.base.ids import BookieId

_PAUSE_S = 0.3
_ANSWER_S = 2.0
_AHEAD = (10**5, 10**5 + 1, 10**9)
"""How far behind the last entry the forged ones are."""
_LACS = (1, 10, 10**6, 2**62)
_BODY_BYTES_MAX = 2000
_GARBAGE_BYTES_MAX = 20_000


class Forger:
    """Sends to one bookie, with a certificate if it asks for one; counts what it sent."""

    def __init__(
        self,
        port: int,
        bookie: BookieId,
        cluster_id: str,
        rng: random.Random,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.sent = 0
        self._port = port
        self._rng = rng
        self._tls = tls
        self._hello = Hello(PROTOCOL_VERSION, FEATURES, cluster_id, bookie.name, bookie.incarnation)

    async def forge(self, ledger_ids: Sequence[int]) -> None:
        """Send what is forged of each ledger, and garbage; the bookie may be gone or refuse."""
        for ledger_id in ledger_ids:
            with contextlib.suppress(OSError, DLError, TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await self._lie_about(ledger_id)
        with contextlib.suppress(OSError):
            await self._send_garbage()
        await asyncio.sleep(self._rng.uniform(0, _PAUSE_S))

    async def _lie_about(self, ledger_id: int) -> None:
        end = RawEnd(*await asyncio.open_connection(HOST, self._port, ssl=self._tls))
        try:
            end.send(self._hello, ReadLac(1, ledger_id, False))
            lac = -1
            while (message := await end.receive()) is not None:
                if isinstance(message, Lac):
                    lac = message.last_add_confirmed
                if getattr(message, "request_id", 0) == 1:
                    break
            end.send(*(self._entry(2 + i, ledger_id, lac + add) for i, add in enumerate(_AHEAD)))
            if lac >= 0:  # an entry that is held, with other bytes
                end.send(self._entry(10, ledger_id, self._rng.randint(0, lac)))
            lie = lac + self._rng.choice(_LACS)
            end.send(WriteLac(11, ledger_id, min(lie, 2**62)))
            self.sent += len(_AHEAD) + 2
            while (message := await end.receive()) is not None:
                if getattr(message, "request_id", 0) == 11 or 11 in getattr(
                    message, "request_ids", ()
                ):
                    break
        finally:
            end.writer.transport.abort()

    def _entry(self, request_id: int, ledger_id: int, entry_id: int) -> Add:
        frame = encode_frame(
            ledger_id=ledger_id,
            entry_id=entry_id,
            last_add_confirmed=self._rng.choice([-1, entry_id - 1]),
            ledger_bytes=self._rng.randint(2**40, 2**50),
            body=[self._rng.randbytes(self._rng.randint(0, _BODY_BYTES_MAX))],
        )
        return Add(request_id, False, [frame])

    async def _send_garbage(self) -> None:
        """Send bytes that are no message, before or after the greeting, or half a message."""
        _, writer = await asyncio.open_connection(HOST, self._port, ssl=self._tls)
        try:
            if self._rng.random() < 0.5:
                writer.write(b"".join(bytes(part) for part in encode(self._hello)))
            data = self._rng.randbytes(self._rng.randint(1, _GARBAGE_BYTES_MAX))
            whole = b"".join(bytes(part) for part in encode(self._entry(1, 0, 0)))
            writer.write(self._rng.choice([data, whole[: len(whole) // 2], whole[:24] + data]))
            self.sent += 1
            async with asyncio.timeout(_ANSWER_S):
                await writer.drain()
        finally:
            writer.transport.abort()
