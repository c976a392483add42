"""Modules that take long to load and that most commands never use: loaded when one does.

Only the process of the command does so; whoever imports dlcore gets modules as always.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

LAZY = ("crc32c", "numpy", "pyarrow")
"""Together half of the time that the clients take to load: checksums and arrays of entries."""


class _LazyModule(ModuleType):
    """Stands for a module until something of it is asked for, then has all that it has."""

    _lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
                self.__dict__.update(importlib.import_module(self.__name__).__dict__)
        return getattr(sys.modules[self.__name__], name)


def load_lazily() -> None:
    """Let the modules of `LAZY` load on first use; those that are loaded stay."""
    for name in LAZY:
        if name not in sys.modules and importlib.util.find_spec(name) is not None:
            sys.modules[name] = _LazyModule(name)
