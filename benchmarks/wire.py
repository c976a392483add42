"""Figures of the wire: one client and one bookie, beside a bare framed loop that does nothing."""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING

from benchmarks.bare_server import Ask
from benchmarks.figures import Figure, Target, measure
from benchmarks.limits import (
    MIB,
    bare_add_rate,
    bare_read_rate,
    bare_server,
    served,
    summed_read_rate,
    windowed_s,
)
from benchmarks.logs import run
from benchmarks.wire_server import BOOKIE, CLUSTER_ID
from dlcore.base.config import LedgerClientConfig
from dlcore.wire.client import WireBookieClient
from dlcore.wire.frames import encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dlcore.base.ids import BookieId
    from dlcore.ops.sandbox.cluster import Sandbox

_RATIO = 0.6
_SIZES = {"1_kb": (1024, 20_000, 256), "512_kb": (512 * 1024, 400, 16)}
"""Bytes of an entry, entries of a round, entries in flight."""
_READ_BYTES = 256 * MIB
_CONFIG = LedgerClientConfig(add_timeout_s=60.0, read_timeout_s=60.0)


def wire_add(_sandbox: Sandbox, folder: Path) -> list[Figure]:
    """Adds of 1 KB and 512 KB, pipelined, to a real storage that does not sync.

    Beside a bare loop, and beside one that does what is promised: it sums and keeps each entry.
    """
    figures = []
    with bare_server(folder) as bare, served("benchmarks.wire_server", folder / "bookie") as bookie:
        ledger_ids = itertools.count(1)
        for name, (size, count, in_flight) in _SIZES.items():
            same = [os.urandom(size)] * count
            bodies = [os.urandom(size) for _ in range(count)]

            def value(size: int = size, count: int = count, in_flight: int = in_flight) -> float:
                ledger_id = next(ledger_ids)
                return run(
                    _add_rate(
                        bookie.address,
                        ledger_id=ledger_id,
                        size=size,
                        count=count,
                        in_flight=in_flight,
                    )
                )

            def limit(
                kind: Ask, bodies: Sequence[bytes], in_flight: int = in_flight
            ) -> Callable[[], float]:
                return lambda: run(
                    bare_add_rate(bare.address, kind, bodies=bodies, in_flight=in_flight)
                )

            figures += [
                _beside(f"wire_add_{name}", value, limit(Ask.TAKE, same)),
                _beside(f"wire_add_{name}_kept", value, limit(Ask.KEEP, bodies)),
            ]
    return figures


def wire_read(_sandbox: Sandbox, folder: Path) -> list[Figure]:
    """Range reads of 1 KB and 512 KB entries from the page cache.

    Beside a bare loop in chunks of 1 MiB, and beside one that does what is promised: it reads a
    file and sums it.
    """
    figures = []
    with bare_server(folder) as bare, served("benchmarks.wire_server", folder / "bookie") as bookie:
        for ledger_id, (name, (size, _, in_flight)) in enumerate(_SIZES.items(), 1):
            count = _READ_BYTES // size
            run(
                _add_rate(
                    bookie.address, ledger_id=ledger_id, size=size, count=count, in_flight=in_flight
                )
            )

            def value(ledger_id: int = ledger_id, count: int = count, size: int = size) -> float:
                return run(_read_rate(bookie.address, ledger_id=ledger_id, size=size, count=count))

            figures += [
                _beside(
                    f"wire_read_{name}",
                    value,
                    lambda: run(bare_read_rate(bare.address, total_bytes=_READ_BYTES)),
                ),
                _beside(
                    f"wire_read_{name}_summed",
                    value,
                    lambda: run(summed_read_rate(bare.address, is_summed=False)),
                ),
            ]
    return figures


def _beside(name: str, value: Callable[[], float], limit: Callable[[], float]) -> Figure:
    target = Target(ratio=_RATIO, is_rate=True)
    return measure(name=name, unit="MB/s", target=target, value=value, limit=limit)


async def _add_rate(
    address: str, *, ledger_id: int, size: int, count: int, in_flight: int
) -> float:
    """Return MB/s of adds."""
    client = _client_of(address)
    body = os.urandom(size)
    frames = [
        encode_frame(
            ledger_id=ledger_id,
            entry_id=entry_id,
            last_add_confirmed=entry_id - 1,
            ledger_bytes=(entry_id + 1) * size,
            body=[body],
        )
        for entry_id in range(count)
    ]
    adds = (client.add_entry(BOOKIE, frame) for frame in frames)
    seconds = await windowed_s(adds, in_flight=in_flight)
    await client.aclose()
    return count * size / 1e6 / seconds


async def _read_rate(address: str, *, ledger_id: int, size: int, count: int) -> float:
    """Return MB/s of a range read."""
    client = _client_of(address)
    got = 0
    started = time.perf_counter()
    async for frames in client.read_entries(
        BOOKIE, ledger_id=ledger_id, first_entry_id=0, last_entry_id=count - 1
    ):
        got += len(frames)
    seconds = time.perf_counter() - started
    assert got == count
    await client.aclose()
    return count * size / 1e6 / seconds


def _client_of(address: str) -> WireBookieClient:
    async def resolve(_: BookieId) -> str:
        return address

    return WireBookieClient(resolve, cluster_id=CLUSTER_ID, config=_CONFIG)
