"""The `dlog` command: a sandbox cluster, and operations on logs, segments, bookies and ledgers."""

from __future__ import annotations

from dlcore.cli.app import main

__all__ = ["main"]
