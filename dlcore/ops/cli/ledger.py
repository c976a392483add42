"""`dlog ledger`: the replicated ledgers under the logs."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import click

from dlcore.base.errors import DLError, InvalidEntryError
from dlcore.ops.cli.context import (
    ask,
    common_options,
    confirmed,
    lists_names,
    note,
    require_consent,
    run_direct,
    wants_json,
)
from dlcore.ops.cli.output import (
    Progress,
    cell,
    end_with,
    show_bytes,
    show_done,
    show_fields,
    show_json,
    show_rows,
    time_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ledger.metadata.store import ReadLedgers
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ops.autorecovery.check import ReplicaCheck
    from dlcore.ops.inspection import LedgerAudit
    from dlcore.wire.frames import EntryFrame

_PAGE = 1000
_RANGES_SHOWN_MAX = 5
_ENTRY_LINE = "{:>8} {:>9} {:>8} {:>8}  {}"


@click.group("ledger")
@common_options
def ledger_group() -> None:
    """Show, check, read, recover and audit ledgers.

    `dlog segment list` shows the ledgers of a log.
    """


@ledger_group.command("list", epilog="Example: dlog ledger list --from 1000 -n 20")
@click.option("--from", "first", type=click.IntRange(min=0), default=0, metavar="ID", help="Start.")
@click.option("-n", "count", type=click.IntRange(min=1), metavar="N", help="At most N ledgers.")
@lists_names
@common_options
def list_ledgers(first: int, count: int | None) -> None:
    """List the ledgers: state, quorums, length, and their logs.

    They ascend by id.  Ledgers with damaged metadata are listed on standard error, with exit code
    1.
    """

    async def read(namespace: DirectNamespace) -> ReadLedgers:
        found: ReadLedgers = {}
        begin, left = first, count
        with Progress() as progress:
            while left is None or left > 0:
                size = _PAGE if left is None else min(_PAGE, left)
                page = await namespace.list_ledgers(first=begin, count=size)
                if not page:
                    break
                found |= page
                begin, left = max(page) + 1, None if left is None else left - len(page)
                progress.tell("ledgers", len(found))
        return found

    found = run_direct(read, is_long=True)
    show_rows(
        [_ledger_row(each) for each in found.values() if not isinstance(each, DLError)],
        columns=("ledger", "state", "quorum", "last_entry", "bytes", "created", "log"),
        empty="no ledgers",
    )
    end_with({f"ledger {i}": each for i, each in found.items() if isinstance(each, DLError)})


def _ledger_row(metadata: LedgerMetadata) -> dict[str, object]:
    closed = metadata.state.name == "CLOSED"
    return {
        "ledger": metadata.ledger_id,
        "state": _state_text(metadata),
        "quorum": str(metadata.quorum),
        "last_entry": metadata.last_entry_id if closed else None,
        "bytes": metadata.length_bytes if closed else None,
        "created": time_text(metadata.created_ms),
        "log": metadata.custom.get("log"),
        "custom": dict(metadata.custom),
    }


@ledger_group.command("read", epilog="Example: dlog ledger read 17 --first 0 --last 9")
@click.argument("ledger_id", type=click.IntRange(min=0))
@click.option("--first", type=click.IntRange(min=0), default=0, metavar="ENTRY", help="Start [0].")
@click.option("--last", type=click.IntRange(min=0), metavar="ENTRY", help="End, included.")
@click.option("--raw", is_flag=True, help="Print only the bodies of the entries.")
@common_options
def read_entries(ledger_id: int, first: int, last: int | None, *, raw: bool) -> None:
    """Read entries of a ledger: bytes, LAC and records.

    Each is verified.  In a ledger that is not closed, up to the last confirmed entry.
    """
    if raw and wants_json():
        raise click.UsageError("give one of --raw and --json, not both")
    if not (raw or wants_json()):
        click.echo(_ENTRY_LINE.format("entry", "bytes", "lac", "records", "txids"))

    async def read(namespace: DirectNamespace) -> None:
        reader = await namespace.ports.ledgers.open_ledger(ledger_id)
        end = await reader.read_last_add_confirmed()
        entries = reader.read(first, end if last is None else last)
        with Progress(beside=sys.stdout) as progress:
            async with contextlib.aclosing(entries):
                async for frames in entries:
                    for frame in frames:
                        _show_entry(frame, raw=raw)
                        progress.tell("entries", frame.entry_id + 1 - first)

    run_direct(read, is_long=True)


def _show_entry(frame: EntryFrame, *, raw: bool) -> None:
    from dlcore.log.entries.body import decode_entry_header

    if raw:
        show_bytes(frame.body)
        return
    fields: dict[str, object] = {
        "entry": frame.entry_id,
        "bytes": len(frame.body),
        "lac": frame.last_add_confirmed,
        "records": None,
        "first_txid": None,
        "last_txid": None,
    }
    with contextlib.suppress(InvalidEntryError):  # the ledger may hold no log
        header = decode_entry_header(frame.body)
        fields |= {
            "records": header.record_count,
            "first_txid": header.first_txid,
            "last_txid": header.last_txid,
        }
    if wants_json():
        show_json(fields)
        return
    txids = "-" if fields["records"] is None else f"{fields['first_txid']}-{fields['last_txid']}"
    click.echo(
        _ENTRY_LINE.format(*(cell(fields[k]) for k in ("entry", "bytes", "lac", "records")), txids)
    )


@ledger_group.command("audit", epilog="Example: dlog ledger audit --delete --yes")
@click.option("--delete", is_flag=True, help="Delete the ledgers that belong to no log.")
@confirmed
@common_options
def audit_ledgers(*, delete: bool, yes: bool) -> None:
    """Compare the existing ledgers with those that logs name.

    Orphans are ledgers that belong to no log and to no staged append: they waste space.  Missing
    are ledgers that a log names and that are gone.  Damaged are logs whose ledgers are not known;
    while there are any, no ledger counts as an orphan.  Exit code 1 if there are any of these,
    unless --delete removed all.
    """
    if delete:
        require_consent(yes=yes)
    audit = run_direct(_audit, is_long=True)
    rows: list[dict[str, object]] = [
        _problem("orphan", ledger=ledger_id) for ledger_id in audit.orphans
    ]
    rows += [
        _problem("missing", ledger=ledger_id, log_id=log_id)
        for ledger_id, log_id in audit.missing.items()
    ]
    rows += [
        _problem("damaged", log_id=log_id, detail=detail)
        for log_id, detail in audit.damaged.items()
    ]
    show_rows(
        rows,
        columns=("ledger", "problem", "log_id", "detail"),
        empty=f"{audit.ledgers} ledgers, {audit.logs} logs: nothing is wrong",
    )
    if delete and audit.orphans:
        ask(f"Delete {len(audit.orphans)} ledgers that belong to no log", yes=yes)
        run_direct(lambda namespace: _delete_ledgers(namespace, audit.orphans), is_long=True)
        note(f"deleted {len(audit.orphans)} ledgers")
    if audit.damaged:
        note(
            f"{len(audit.damaged)} logs are damaged, so it is unknown which ledgers they have: no "
            "ledger is called an orphan"
        )
    if audit.missing or audit.damaged or (audit.orphans and not delete):
        click.get_current_context().exit(1)


def _problem(
    problem: str, *, ledger: int | None = None, log_id: str | None = None, detail: str | None = None
) -> dict[str, object]:
    return {"ledger": ledger, "problem": problem, "log_id": log_id, "detail": detail}


async def _audit(namespace: DirectNamespace) -> LedgerAudit:
    from dlcore.ops import inspection

    with Progress() as progress:
        return await inspection.audit_ledgers(namespace.log_context, report=progress.tell)


async def _delete_ledgers(namespace: DirectNamespace, ledger_ids: Sequence[int]) -> None:
    from dlcore.ops.inspection import delete_orphan

    with Progress() as progress:
        for number, ledger_id in enumerate(ledger_ids):
            progress.tell("ledgers deleted", number, len(ledger_ids))
            await delete_orphan(namespace.log_context, ledger_id)


@ledger_group.command("show", epilog="Example: dlog ledger show 17")
@click.argument("ledger_id", type=click.IntRange(min=0))
@common_options
def show_ledger(ledger_id: int) -> None:
    """Show one ledger: state, quorums, length, its bookies or objects.

    Wanted is the intended quorum of a ledger that was created with fewer bookies.  Lacking is the
    number of bookies that must still be added for each entry.
    """
    metadata = run_direct(lambda namespace: namespace.get_ledger(ledger_id))
    quorum = metadata.quorum
    closed = metadata.state.name == "CLOSED"
    ensembles = [
        {
            "first_entry": ensemble.first_entry_id,
            "bookies": [str(bookie) for bookie in ensemble.bookies],
        }
        for ensemble in metadata.ensembles
    ]
    objects = [
        {"first_entry": each.first_entry_id, "object": f"{metadata.folder}/{each.name}"}
        for each in metadata.objects
    ]
    fields: dict[str, object] = {
        "ledger": metadata.ledger_id,
        "state": _state_text(metadata),
        "ensemble_size": quorum.ensemble_size,
        "write_quorum": quorum.write_quorum_size,
        "ack_quorum": quorum.ack_quorum_size,
        "wanted": None if metadata.wanted is None else str(metadata.wanted),
        "lacking": metadata.copies_lacking,
        "created": time_text(metadata.created_ms),
        "log": metadata.custom.get("log"),
        # Before a ledger is closed, only its bookies know its end.
        "last_entry": metadata.last_entry_id if closed else None,
        "bytes": metadata.length_bytes if closed else None,
    }
    if wants_json():
        lists = {"ensembles": ensembles, "objects": objects}
        show_fields(fields | {"custom": dict(metadata.custom)} | lists)
        return
    show_fields(fields)
    if metadata.is_cold:
        show_rows(objects, columns=("first_entry", "object"), empty="")
    else:
        show_rows(ensembles, columns=("first_entry", "bookies"), empty="")


@ledger_group.command("recover", epilog="Example: dlog ledger recover 17 --yes")
@click.argument("ledger_id", type=click.IntRange(min=0))
@confirmed
@common_options
def recover_ledger(ledger_id: int, *, yes: bool) -> None:
    """Fence the writer of a ledger, and close it.

    It ends after its last entry.  For a closed ledger this is harmless.  A live writer cannot write
    to the ledger any more, so the command asks unless it is closed.
    """
    found = run_direct(lambda namespace: namespace.get_ledger(ledger_id))
    if found.state.name != "CLOSED":
        require_consent(yes=yes)
        log = found.custom.get("log")
        of = "" if log is None else f" of log {log}"
        ask(f"Close ledger {ledger_id}{of}: a client that still writes it is fenced", yes=yes)

    async def recover(namespace: DirectNamespace) -> LedgerMetadata:
        return await namespace.ports.ledgers.recover_ledger(ledger_id)

    metadata = run_direct(recover)
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
    """Check whether each bookie holds the entries that it should.

    Each is asked for the list of its entries, and none of these is read: one whose bytes are
    damaged is on the list.  Reads and scrubbing find damage, and the bookie's log names it.  In a
    ledger that is not closed, the last ensemble is checked up to the LAC.  Exit code 1 unless all
    entries are there.
    """
    from dlcore.ops.autorecovery.maintenance import Maintenance, is_replicated

    async def check(namespace: DirectNamespace) -> tuple[LedgerMetadata, list[ReplicaCheck]]:
        return await Maintenance(namespace.ports).check_ledger(ledger_id)

    metadata, checks = run_direct(check)
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
