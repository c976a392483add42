"""Manifests of Iceberg tables that this process has read: a manifest never changes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlcore.log.cold.table_format import TableFile


class ManifestsRead:
    """The files of manifests, by the URLs of these; those that were used last stay.

    Any thread may use it.

    Args:
        files_max: how many files are kept in all.
    """

    def __init__(self, *, files_max: int) -> None:
        self._files_max = files_max
        self._count = 0
        self._kept: OrderedDict[str, tuple[TableFile, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, url: str) -> tuple[TableFile, ...] | None:
        """Return the files of a manifest; None if it is not kept."""
        with self._lock:
            found = self._kept.get(url)
            if found is not None:
                self._kept.move_to_end(url)
            return found

    def put(self, url: str, files: tuple[TableFile, ...]) -> None:
        """Keep the files of a manifest, in the place of those that were not used for longest."""
        with self._lock:
            self._count += len(files) - len(self._kept.pop(url, ()))
            self._kept[url] = files
            while self._count > self._files_max:
                self._count -= len(self._kept.popitem(last=False)[1])
