"""The `dlog` command: a sandbox cluster, and operations on logs, segments, bookies and ledgers."""

from __future__ import annotations

from dlcore.base.extras import missing_packages_explained

with missing_packages_explained():
    from dlcore.ops.cli.app import main

__all__ = ["main"]
