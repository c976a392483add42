"""Simulated TCP: bytes between two processes, in order, cut at random, delayed, or stuck for good.

A piece that the network loses is sent again after a while, and what was behind it waits.  Some are
never made good: then nothing more arrives in that direction, and neither side is reported.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from tests.simulation.network import Network

_PIECES_MAX = 4
_AGAIN_S = 0.2
_STUCK_CHANCE = 0.2
_HIGH_BYTES = 8 * 1024
_LOW_BYTES = 2 * 1024


class SimTransport(asyncio.Transport):
    """One side of a connection; `couple` makes two of them."""

    def __init__(
        self,
        network: Network,
        rng: random.Random,
        protocol: asyncio.BufferedProtocol,
        *,
        source: str,
        target: str,
    ) -> None:
        super().__init__()
        self._network = network
        self._rng = rng
        self._protocol = protocol
        self._source = source
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._other: SimTransport
        self._is_closed = False
        self._is_paused = False
        self._is_reading = True
        self._unsent = 0
        self._sent = 0
        self._expected = 0
        self._early: dict[int, bytes] = {}
        self._arrived: deque[bytes] = deque()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Limits are small here, so that they are reached."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Return the process at the other end."""
        return self._target if name == "peername" else default

    def get_write_buffer_size(self) -> int:
        """Return the bytes on their way."""
        return self._unsent

    def is_closing(self) -> bool:
        """Return whether it was closed."""
        return self._is_closed

    def can_write_eof(self) -> bool:
        """Half of a connection is never closed here."""
        return False

    def pause_reading(self) -> None:
        """Keep what arrives."""
        self._is_reading = False

    def resume_reading(self) -> None:
        """Go on with what has arrived."""
        self._is_reading = True
        self._loop.call_soon(self._drain)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send buffers, cut anywhere."""
        self.write(b"".join(list_of_data))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, cut anywhere."""
        if self._is_closed or not data:
            return
        data = bytes(data)
        count = self._rng.randint(0, min(_PIECES_MAX - 1, len(data) - 1))
        cuts = [0, *sorted(self._rng.sample(range(1, len(data)), count)), len(data)]
        self._unsent += len(data)
        for start, end in pairwise(cuts):
            self._send(data[start:end])
        if self._unsent > _HIGH_BYTES and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        """End behind what was sent."""
        if not self._is_closed:
            self._send(b"")
            self._is_closed = True
            self._loop.call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        """End; what was sent is on its way."""
        self.close()

    def vanish(self, *, is_reported: bool) -> None:
        """End with its process; the other side gets a reset, or not."""
        if self._is_closed:
            return
        if is_reported:
            self._send(b"")
        self._is_closed = True
        self._protocol.connection_lost(None)

    def _send(self, piece: bytes) -> None:
        number = self._sent
        self._sent += 1
        if self._network.is_held(self._source):
            self._network.hold(self._source, lambda: self._travel(number, piece))
        else:
            self._travel(number, piece)

    def _travel(self, number: int, piece: bytes) -> None:
        if not self._network.loses(self._source, self._target):
            self._network.carry(
                self._source, self._target, lambda: self._other.on_piece(number, piece)
            )
        elif self._rng.random() >= _STUCK_CHANCE:
            self._loop.call_later(_AGAIN_S, self._travel, number, piece)

    def on_piece(self, number: int, piece: bytes) -> None:
        """Take a piece that arrived; one behind a gap waits."""
        self._early[number] = piece
        while self._expected in self._early:
            self._arrived.append(self._early.pop(self._expected))
            self._expected += 1
        self._drain()

    def _drain(self) -> None:
        while self._arrived and self._is_reading and not self._is_closed:
            piece = self._arrived.popleft()
            if not piece:
                self.close()
                return
            target = memoryview(self._protocol.get_buffer(-1))
            size = min(len(target), len(piece))
            target[:size] = piece[:size]
            if size < len(piece):
                self._arrived.appendleft(piece[size:])
            self._other.on_taken(size)
            self._protocol.buffer_updated(size)

    def on_taken(self, size: int) -> None:
        """Take note that the other side took bytes."""
        self._unsent -= size
        if self._is_paused and self._unsent < _LOW_BYTES and not self._is_closed:
            self._is_paused = False
            self._protocol.resume_writing()


def couple(
    network: Network,
    rng: random.Random,
    client: asyncio.BufferedProtocol,
    bookie: asyncio.BufferedProtocol,
    *,
    client_name: str,
    bookie_name: str,
) -> tuple[SimTransport, SimTransport]:
    """Connect two protocols, the bookie's first; return both sides."""
    near = SimTransport(network, rng, client, source=client_name, target=bookie_name)
    far = SimTransport(network, rng, bookie, source=bookie_name, target=client_name)
    near._other, far._other = far, near
    return near, far
