"""`dlog log redact`: makes rows of a typed log null, and removes every copy of what they were."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlcore.ops.cli.context import (
    ask,
    common_options,
    confirmed,
    note,
    require_consent,
    run_direct,
)
from dlcore.ops.cli.output import Progress, show_fields

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.access.audit_file import AuditFile
    from dlcore.ops.upkeep.redactor import LogRedactor, Receipt

AUDIT_FILE = "dlog-audit.jsonl"
ENTRANCE = "dlog log redact"


@click.command("redact", epilog="Example: dlog log redact clicks --where 'user_id = 42' --dry-run")
@click.argument("log")
@click.option(
    "--where",
    required=True,
    metavar="CONDITIONS",
    help="Rows that are redacted: \"user_id = 42 and city in ('Rome', 'Paris')\"; also !=, <, <=, "
    ">, >=, `is null`, `is not null`.",
)
@click.option("--dry-run", is_flag=True, help="Only count the rows, and name what forbids it.")
@click.option(
    "--purge",
    is_flag=True,
    help="Also if no row is found, remove old copies of records that LOG has no more.",
)
@click.option(
    "--patience-s",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="S",
    help="How long to wait for old copies to go.  The same command goes on later.",
)
@click.option(
    "--audit-file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=AUDIT_FILE,
    show_default=True,
    help="The audit log that gets the receipt.",
)
@confirmed
@common_options
def redact_log(
    log: str,
    *,
    where: str,
    dry_run: bool,
    purge: bool,
    patience_s: float,
    audit_file: Path,
    yes: bool,
) -> None:
    """Make rows of a typed LOG null, in all copies of them.

    Their columns become null; positions, counts and ids stay.  Old copies are removed: from
    ledgers, objects, a Delta table with its history, and the files of bookies.  It ends with 0 when
    none is left.
    """
    if dry_run:
        show_fields(run_direct(lambda namespace: _look(namespace, log, where), is_long=True))
        return
    require_consent(yes=yes)
    ask(f"Redact rows of log {log}, which nothing brings back", yes=yes)
    receipt = run_direct(
        lambda namespace: _redact(
            namespace, log, where, audit_file, purge=purge, patience_s=patience_s
        ),
        is_long=True,
    )
    if not receipt.done.rows and not receipt.is_purged:
        note("no row was found; --purge removes copies of records that the log has no more")
    if receipt.left:
        click.get_current_context().exit(1)


async def _look(namespace: DirectNamespace, log: str, where: str) -> dict[str, object]:
    with Progress() as progress:
        redactor = await _opened(namespace, log, where, progress, patience_s=0)
        found = await redactor.look()
    return {
        "log": found.log,
        "rows": found.rows,
        "rows_in_progress": found.open_rows,
        "segments": found.segments,
        "extents": found.extents,
        "cold_extents": found.cold_extents,
        "obstacles": "; ".join(found.obstacles) or None,
        "left": "; ".join(found.kept) or None,
    }


async def _redact(
    namespace: DirectNamespace,
    log: str,
    where: str,
    audit_file: Path,
    *,
    purge: bool,
    patience_s: float,
) -> Receipt:
    from dlcore.base.access.audit_file import AuditFile

    # Opened first: without a place for the receipt nothing is redacted.
    audit = AuditFile(audit_file)
    try:
        with Progress() as progress:
            redactor = await _opened(namespace, log, where, progress, patience_s=patience_s)
            receipt = await redactor.redact(purge=purge)
        # Shown first: the audit log may be full, and only here is the salt.
        show_fields({**fields_of(receipt), "audit_file": str(audit_file)})
        _write(audit, receipt)
    finally:
        await audit.aclose()
    return receipt


async def _opened(
    namespace: DirectNamespace, log: str, where: str, progress: Progress, *, patience_s: float
) -> LogRedactor:
    from dlcore.ops.upkeep.redactor import LogRedactor

    return await LogRedactor.open(
        namespace.log_context,
        namespace.staging_owner,
        log,
        where,
        report=lambda text: progress.tell("redaction", text),
        patience_s=patience_s,
    )


def _write(audit: AuditFile, receipt: Receipt) -> None:
    from dlcore.base.access.audit import AuditLine

    done = receipt.done
    result = "ok" if not receipt.left else "waits: " + "; ".join(receipt.left)
    audit.write(
        AuditLine(
            principal=f"{getpass.getuser()}@{socket.gethostname()}",
            address="",
            entrance=ENTRANCE,
            resource=(
                f"log={receipt.log.name} id={receipt.log.log_id} where={done.shape!r} "
                f"digest=sha256:{done.digest} rows={done.rows} "
                f"segments={len(done.segments)} ledgers={len(done.ledgers)} "
                f"objects={done.objects}"
            ),
            result=result,
        )
    )
    audit.require_writable()


def fields_of(receipt: Receipt) -> dict[str, Any]:
    """Return a receipt for people and programs; the salt is only here, and not in the audit log."""
    done = receipt.done
    return {
        "log": receipt.log.name,
        "rows": done.rows,
        "segments": len(done.segments),
        "ledgers": len(done.ledgers),
        "objects": done.objects,
        "purged": receipt.is_purged,
        "where": done.shape,
        "salt": done.salt,
        "digest": done.digest,
        "left": "; ".join(receipt.left) or None,
    }
