"""Fills a stopped bookie's folder by its own storage, far faster than over the wire.

`python -m benchmarks.fill_storage FOLDER BYTES` fills sealed files, and one that is nearly full and
not sealed, says "full", and waits to be killed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from pathlib import Path

from bookie.config import StorageConfig
from bookie.disks.real import RealDisk
from bookie.ledger_storage import LedgerStorage
from bookie.membership.identity import COOKIE_FILE
from dlcore.base.clock import SystemClock
from dlcore.ledger.metadata.values import BookieCookie
from dlcore.metadata.stored import decode
from dlcore.wire.frames import encode_frame

LEDGERS = 1000
BIG_BYTES = 256 * 1024
SMALL_BYTES = 1024
_SMALL_FILES_EVERY = 4
"""One sealed file in so many holds small entries, and so does the unsealed one."""
_UNSEALED_SHARE = 0.95
_FLUSH_BYTES = 8 * 1024 * 1024


async def fill(folder: Path, total_bytes: int) -> None:
    """Fill `folder`; return when all is durable, with the storage still open."""
    cookie = decode(BookieCookie, (folder / COOKIE_FILE).read_bytes(), source=COOKIE_FILE)
    config = StorageConfig()
    storage = await LedgerStorage.open(
        RealDisk(folder),
        config,
        clock=SystemClock(),
        owner=f"{cookie.cluster_id}/{cookie.incarnation}",
    )
    entry_ids = itertools.count()
    files = max(1, round(total_bytes / config.file_bytes_max))
    for number in range(1, files):
        body_bytes = BIG_BYTES if number % _SMALL_FILES_EVERY else SMALL_BYTES
        await _add(storage, entry_ids, body_bytes, number * config.file_bytes_max)
    await _add(
        storage, entry_ids, SMALL_BYTES, int((files - 1 + _UNSEALED_SHARE) * config.file_bytes_max)
    )


async def _add(
    storage: LedgerStorage, entry_ids: itertools.count[int], body_bytes: int, stored_bytes_max: int
) -> None:
    """Add entries round robin to all ledgers until so much is stored."""
    body = os.urandom(body_bytes)
    while (room := stored_bytes_max - storage.status.stats().stored_bytes) > body_bytes:
        for _ in range(min(_FLUSH_BYTES, room) // (body_bytes + 1)):
            entry_id, ledger_id = divmod(next(entry_ids), LEDGERS)
            durable = storage.writes.add_entry(
                encode_frame(
                    ledger_id=ledger_id,
                    entry_id=entry_id,
                    last_add_confirmed=entry_id - 1,
                    ledger_bytes=0,
                    body=[body],
                )
            )
        await durable


async def _main(folder: Path, total_bytes: int) -> None:
    await fill(folder, total_bytes)
    print("full", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2])))
