"""Bookies that may lose durable data: no more than the promise allows.

An acknowledged entry is promised to survive the loss of Qa - 1 bookies.  Damage to a bookie's
copies counts like their loss.  A run has at most Qa - 1 *victims* therefore: only they lose disks,
or sectors or have bytes changed.  A victim that got an empty disk is another bookie from then
on, and is spared.  All others only crash, and must bring back everything that they ever
acknowledged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie.files.format import RECORD_HEADER_BYTES, file_name, file_number
from tests.fixtures.memory_folder import SECTOR_BYTES

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from bookie.ledger_storage import LedgerStorage
    from tests.fixtures.memory_disk import MemoryDisk


class FaultAtlas:
    """The victims of a run, and what was done to them."""

    def __init__(self, names: Sequence[str], *, losses_max: int, rng: random.Random) -> None:
        self.victims = rng.sample(list(names), min(losses_max, len(names)))
        self._rng = rng

    def damage(self, disk: MemoryDisk, storage: LedgerStorage) -> str:
        """Damage something that the bookie has acknowledged; return what, empty if nothing.

        The last batch is spared until its MARK follows it: before that, damage looks like
        the torn write of a batch that was never acknowledged.
        """
        rng = self._rng
        places = [
            (each, size)
            for each in disk.names()
            if (size := _durable_size(each, disk, storage)) > 0
        ]
        if not places:
            return ""
        file, size = rng.choice(places)
        offset = rng.randrange(size)
        kind = rng.choice(("bit", "bit", "sector", "garbled"))
        start = offset - offset % SECTOR_BYTES
        if kind != "bit" and start + SECTOR_BYTES > size and file_number(file) is not None:
            start = size - SECTOR_BYTES
            kind = "bit" if start < 0 or start % SECTOR_BYTES else kind
        if kind == "bit":
            disk.folder.flip(file, offset, 1 << rng.randrange(8))
        elif kind == "sector":
            disk.folder.lose_sector(file, start)
        else:
            length = min(SECTOR_BYTES, size - start)
            disk.folder.corrupt(file, start, rng.randbytes(length))
        return f"{kind} {file} at {offset} of {size}"


def _durable_size(file: str, disk: MemoryDisk, storage: LedgerStorage) -> int:
    """Return the length of the part of a file whose damage differs from a torn write."""
    number = file_number(file)
    if number is None or storage.core.log.unsealed.file_of(number) is None:
        return disk.folder.size_of(file)
    if not storage.core.log.is_marked or storage.core.log.commits.queue.pending_bytes:
        return 0
    newest = max(each.number for each in storage.core.log.unsealed.indexes())
    if file != file_name(newest):
        return 0  # its footer is on the way
    unsealed = storage.core.log.unsealed.durable_part(number)
    assert unsealed is not None
    return unsealed[1] - RECORD_HEADER_BYTES
