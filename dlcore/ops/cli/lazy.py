"""Lazy loading of modules that take long to load and that most commands never use.

Only the process of the command does this; other programs that import dlcore load modules as usual.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

LAZY = ("crc32c", "numpy", "pyarrow")
"""Together they take half of the clients' load time: checksums, and arrays of entries."""


class _LazyModule(ModuleType):
    """A placeholder for a module, which loads it at the first access to an attribute."""

    _lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
                self.__dict__.update(importlib.import_module(self.__name__).__dict__)
        return getattr(sys.modules[self.__name__], name)


def load_lazily() -> None:
    """Make the modules of `LAZY` load at first use; modules that are loaded already stay."""
    for name in LAZY:
        if name not in sys.modules and importlib.util.find_spec(name) is not None:
            sys.modules[name] = _LazyModule(name)
