"""`dlog bookie`: the storage nodes of a namespace."""

from __future__ import annotations

import click

from dlcore.cli.context import common_options, connect
from dlcore.cli.output import show_rows


@click.group("bookie")
@common_options
def bookie_group() -> None:
    """Look at the bookies that are registered."""


@bookie_group.command(
    "list", epilog="Example: dlog bookie list --uri distributedlog://127.0.0.1:2181/dlog"
)
@common_options
def list_bookies() -> None:
    """List the bookies that are registered now: name, address, whether they take writes."""
    with connect() as namespace:
        bookies = sorted(namespace.get_bookies(), key=lambda info: info.bookie)
    rows = [
        {
            "name": info.bookie.name,
            "address": info.address,
            "read_only": info.read_only,
            "incarnation": info.bookie.incarnation,
        }
        for info in bookies
    ]
    show_rows(
        rows,
        columns=("name", "address", "read_only", "incarnation"),
        empty="no bookie is registered",
    )
