"""The `dlog` command: a sandbox cluster, and operations on logs, segments, bookies and ledgers."""

from __future__ import annotations

import sys

from dlcore.base.extras import missing_packages_explained

try:
    with missing_packages_explained():
        from dlcore.ops.cli.app import main
except KeyboardInterrupt:
    # Loading takes half a second on a busy machine: Ctrl-C ends it as it ends a command.
    sys.stderr.write("error: interrupted\n")
    sys.exit(130)

__all__ = ["main"]
