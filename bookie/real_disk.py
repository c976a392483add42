"""A directory of the machine's file system."""

from __future__ import annotations

from pathlib import Path


class RealDisk:
    """One directory, locked against other processes.

    Raises:
        ConfigurationError: the directory is in use, or cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
