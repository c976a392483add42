"""The parts of tables that a process has read and keeps, bounded by the files that they name."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

Kept = TypeVar("Kept")

FILES_KEPT_MAX = 600_000
"""Files that a process keeps in all: 200 MB, a year of one a minute."""


class _Entry(NamedTuple, Generic[Kept]):
    value: Kept
    files: int


class FilesKept(Generic[Kept]):
    """Values by URLs; those that were used last stay.

    Any thread may use it.

    Args:
        files_max: how many files the values have in all.
    """

    def __init__(self, *, files_max: int = FILES_KEPT_MAX) -> None:
        self._files_max = files_max
        self._count = 0
        self._kept: OrderedDict[str, _Entry[Kept]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, url: str) -> Kept | None:
        """Return the value of a URL; None if it is not kept."""
        with self._lock:
            found = self._kept.get(url)
            if found is None:
                return None
            self._kept.move_to_end(url)
            return found.value

    def put(self, url: str, value: Kept, *, files: int) -> None:
        """Keep a value with so many files, in the place of those that were not used for longest."""
        with self._lock:
            self._forget(url)
            self._count += files
            self._kept[url] = _Entry(value, files)
            while self._count > self._files_max:
                self._forget(next(iter(self._kept)))

    def forget(self, url: str) -> None:
        """Keep nothing of a URL."""
        with self._lock:
            self._forget(url)

    def _forget(self, url: str) -> None:
        found = self._kept.pop(url, None)
        self._count -= 0 if found is None else found.files
