"""`python -m dlcore.cli`: the `dlog` command, if it is not on the path."""

from __future__ import annotations

from dlcore.cli.app import main

main()
