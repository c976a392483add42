"""A bookie's service on its real storage, with syncs that cost nothing: what is left is the wire.

And direct writes, which wait for the device, synced or not; through the page cache they would take
four times the CPU.

`python -m benchmarks.wire_server FOLDER` prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from unittest.mock import patch

import uvloop

from bookie.config import StorageConfig
from bookie.disks.real import RealDisk
from bookie.ledger_storage import LedgerStorage
from bookie.serving.service import BookieService
from dlcore.base import server_process
from dlcore.base.clock import SystemClock
from dlcore.base.config import MIB
from dlcore.base.ids import BookieId

CLUSTER_ID = "benchmark"
BOOKIE = BookieId("bookie", "0" * 32)


async def serve(folder: Path) -> None:
    """Serve on a free port until standard input ends."""
    disk = RealDisk(folder)
    storage = await LedgerStorage.open(disk, StorageConfig(), clock=SystemClock())
    service = BookieService(
        storage, bookie=BOOKIE, cluster_id=CLUSTER_ID, connection_bytes_max=16 * MIB
    )
    server = await service.listen("127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()
    await service.aclose(grace_s=0.0)
    await storage.aclose()
    await disk.aclose()


if __name__ == "__main__":
    server_process.keep_what_is_freed()
    with (
        patch.object(os, "fdatasync", lambda _descriptor: None),
        patch.object(os, "RWF_DSYNC", 0),
    ):
        uvloop.run(serve(Path(sys.argv[1])))
