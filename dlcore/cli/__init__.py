"""The `dlog` command: a sandbox to try things in, and logs, segments, bookies, ledgers by hand."""

from __future__ import annotations

from dlcore.cli.app import main

__all__ = ["main"]
