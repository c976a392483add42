"""`dlog ledger`: the replicated ledgers under the logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dlcore.autorecovery.maintenance import Maintenance, is_replicated
from dlcore.cli.context import common_options, connect, run_async, wants_json
from dlcore.cli.output import show_done, show_fields, show_rows, time_text

if TYPE_CHECKING:
    from dlcore.autorecovery.check import ReplicaCheck
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.namespace import Namespace

_RANGES_SHOWN_MAX = 5


@click.group("ledger")
@common_options
def ledger_group() -> None:
    """Look at ledgers and end them; `dlog segment list` says which ledgers a log has."""


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
        "state": _state_text(metadata),
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


@ledger_group.command("recover", epilog="Example: dlog ledger recover 17")
@click.argument("ledger_id", type=click.IntRange(min=0))
@common_options
def recover_ledger(ledger_id: int) -> None:
    """Fence the writer of a ledger and close it after its last entry; harmless if it is closed."""

    async def recover(namespace: Namespace) -> LedgerMetadata:
        return await Maintenance(namespace.recovery_services).recover_ledger(ledger_id)

    metadata = run_async(recover)
    show_done(
        f"ledger {ledger_id} is closed, its last entry is {metadata.last_entry_id}",
        {
            "ledger": ledger_id,
            "last_entry": metadata.last_entry_id,
            "bytes": metadata.length_bytes,
        },
    )


@ledger_group.command("check", epilog="Example: dlog ledger check 17")
@click.argument("ledger_id", type=click.IntRange(min=0))
@common_options
def check_ledger(ledger_id: int) -> None:
    """Ask each bookie of each ensemble whether it holds what it should.

    Of a ledger that is not closed the last ensemble is checked up to what readers may see.  Exit
    code 1 unless all is there.
    """

    async def check(namespace: Namespace) -> tuple[LedgerMetadata, list[ReplicaCheck]]:
        return await Maintenance(namespace.recovery_services).check_ledger(ledger_id)

    metadata, checks = run_async(check)
    rows = [_check_row(each) for each in checks]
    is_whole = is_replicated(metadata, checks)
    if wants_json():
        show_fields(
            {
                "ledger": ledger_id,
                "state": _state_text(metadata),
                "replicated": is_whole,
                "replicas": rows,
            }
        )
    else:
        show_fields({"ledger": ledger_id, "state": _state_text(metadata), "replicated": is_whole})
        show_rows(
            rows,
            columns=("first_entry", "last_entry", "position", "bookie", "state", "detail"),
            empty="",
        )
    if not is_whole:
        click.get_current_context().exit(1)


def _check_row(check: ReplicaCheck) -> dict[str, object]:
    missing = sum(each.last_entry_id - each.first_entry_id + 1 for each in check.missing)
    shown = [f"{r.first_entry_id}-{r.last_entry_id}" for r in check.missing[:_RANGES_SHOWN_MAX]]
    if len(check.missing) > len(shown):
        shown.append(f"… {len(check.missing) - len(shown)} more ranges")
    state, detail = "holds", None
    if check.unknown is not None:
        state, detail = "unknown", check.unknown
    elif missing:
        state, detail = "misses", ", ".join(shown)
    return {
        "first_entry": check.fragment.first_entry_id,
        "last_entry": check.fragment.last_entry_id,
        "position": check.position,
        "bookie": str(check.bookie),
        "state": state,
        "missing_entries": missing if check.unknown is None else None,
        "detail": detail,
    }


def _state_text(metadata: LedgerMetadata) -> str:
    return metadata.state.name.lower().replace("_", " ")
