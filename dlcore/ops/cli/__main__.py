"""`python -m dlcore.ops.cli`: the `dlog` command, if it is not on the path."""

from __future__ import annotations

from dlcore.ops.cli.app import main

main()
