"""`dlog ledger`: the replicated ledgers under the logs."""

from __future__ import annotations

import click

from dlcore.cli.context import common_options, connect, wants_json
from dlcore.cli.output import show_fields, show_rows, time_text


@click.group("ledger")
@common_options
def ledger_group() -> None:
    """Look at ledgers; `dlog segment list` says which ledgers a log has."""


@ledger_group.command("show", epilog="Example: dlog ledger show 17")
@click.argument("ledger_id", type=click.IntRange(min=0))
@common_options
def show_ledger(ledger_id: int) -> None:
    """Show one ledger: state, quorums, length, and which bookies hold which entries."""
    with connect() as namespace:
        metadata = namespace.get_ledger(ledger_id)
    quorum = metadata.quorum
    closed = metadata.state.name == "CLOSED"
    ensembles = [
        {
            "first_entry": ensemble.first_entry_id,
            "bookies": [str(bookie) for bookie in ensemble.bookies],
        }
        for ensemble in metadata.ensembles
    ]
    fields: dict[str, object] = {
        "ledger": metadata.ledger_id,
        "state": metadata.state.name.lower().replace("_", " "),
        "ensemble_size": quorum.ensemble_size,
        "write_quorum": quorum.write_quorum_size,
        "ack_quorum": quorum.ack_quorum_size,
        "created": time_text(metadata.created_ms),
        # Until a ledger is closed only its bookies know its end.
        "last_entry": metadata.last_entry_id if closed else None,
        "bytes": metadata.length_bytes if closed else None,
    }
    if wants_json():
        show_fields(fields | {"custom": dict(metadata.custom), "ensembles": ensembles})
        return
    show_fields(fields)
    show_rows(ensembles, columns=("first_entry", "bookies"), empty="")
