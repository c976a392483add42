"""The history of a Delta table: what a reader of older versions, or of statistics, would find.

A commit's file has statistics of the files that it added, texts among them.  Once a checkpoint has
all of the newest version, no earlier commit or checkpoint is needed to read that version.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dlcore.log.cold.delta_format import DELTA
from dlcore.log.cold.delta_tables import DeltaTables

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlcore.log.cold.objects import Objects

_VERSION = re.compile(r"(\d{20})\.")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(\..+)?\.parquet")


def before_last_checkpoint(names: Iterable[str]) -> list[str]:
    """Return the files of a table's log that belong to versions before its last checkpoint."""
    known = list(names)
    checkpoints = [int(found[1]) for each in known if (found := _CHECKPOINT.fullmatch(each))]
    last = max(checkpoints, default=0)
    return [each for each in known if (found := _VERSION.match(each)) and int(found[1]) < last]


async def forget_history(objects: Objects, url: str, app_id: str) -> int:
    """Delete all versions of a table but the newest; return how many files of its log went.

    Raises:
        ObjectStoreError: that failed, or it is not known; nothing of the newest version is lost.
    """
    await DeltaTables(url, app_id, objects).tidy()
    folder = f"{url}/{DELTA.folder}"
    found = [each.url async for page in objects.list_below(folder) for each in page]
    doomed = before_last_checkpoint(each.removeprefix(f"{folder}/") for each in found)
    for name in doomed:
        await objects.delete(f"{folder}/{name}")
    return len(doomed)
