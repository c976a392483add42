"""`dlog log copy`, `purge` and `cat`: copy a log's records, drop old ones, print bytes."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from dlcore.base.config import LogConfig, LogSettings
from dlcore.base.errors import LogExistsError
from dlcore.base.ids import DLSN
from dlcore.ops.cli.context import ask, common_options, confirmed, require_consent, run_direct
from dlcore.ops.cli.output import Progress, show_bytes, show_done, telling_time

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace

_CHUNK_BYTES = 1 << 20


@click.command("copy", epilog="Example: dlog log copy clicks clicks-copy --create")
@click.argument("source")
@click.argument("target")
@click.option("--create", is_flag=True, help="Create a missing TARGET like SOURCE.")
@common_options
def copy_records(source: str, target: str, *, create: bool) -> None:
    """Copy the readable records of SOURCE to the end of TARGET.

    Each record is copied once.  The position is stored with the copied records: another call, also
    after a crash, continues there, and copies the records since then.  The position is deleted 90
    days after the last copy, or earlier with --commits-age-s of auto-recovery.  A later copy begins
    again, and repeats records.  With --create a missing TARGET has the schema of SOURCE, and is
    encrypted if that is.
    """
    progress = Progress()

    async def copy(namespace: DirectNamespace) -> int:
        from dlcore.api.copying import copy_log

        async with await namespace.open_log(source) as manager:
            if create:
                quorum = (await manager.status()).quorum
                assert quorum is not None, "a direct namespace knows it"
                config = LogConfig(quorum=quorum)
                settings = LogSettings(encrypted=(await manager.get_settings()).encrypted)
                with contextlib.suppress(LogExistsError):
                    schema = await manager.get_schema()
                    await namespace.create_log(
                        target, config=config, settings=settings, schema=schema
                    )
            report = partial(progress.tell, "records copied")
            return await copy_log(manager, namespace, target, report=report)

    with progress:
        count = run_direct(copy, is_long=True)
    fields = {"log": source, "target": target, "records": count}
    show_done(f"copied {count} records of log {source} to {target}", fields)


@click.command("purge", epilog="Example: dlog log purge clicks 1700000000000 --yes")
@click.argument("log")
@click.argument("txid", type=click.IntRange(min=0))
@confirmed
@common_options
def purge_log(log: str, txid: int, *, yes: bool) -> None:
    """Truncate segments of LOG with transaction ids below TXID.

    That is permanent, and takes those in which all are below.  The last segment stays, and so does
    the one that holds the first record to keep.
    """
    require_consent(yes=yes)

    async def count(namespace: DirectNamespace) -> tuple[int, DLSN]:
        async with await namespace.open_log(log) as manager:
            position = await manager.get_dlsn_not_less_than_txid(txid)
            start = DLSN(position.lssn, 0, 0)
            return await manager.get_log_record_count(None, start), start

    records, start = run_direct(count)
    ask(f"Drop the {records} records of log {log} before segment {start.lssn}", yes=yes)

    async def purge(namespace: DirectNamespace) -> bool:
        async with await namespace.open_log(log) as manager:
            return await manager.purge_logs_older_than(txid)

    changed = run_direct(telling_time("purging", purge), is_long=True)
    done = f"purged log {log}" if changed else f"log {log} has no segment that is older"
    show_done(done, {"log": log, "txid": txid, "changed": changed})


@click.command("cat", epilog="Example: dlog log cat pictures --position 4096 > pictures.tar")
@click.argument("log")
@click.option("--position", type=click.IntRange(min=0), help="The first byte wanted [the first].")
@common_options
def cat_log(log: str, position: int | None) -> None:
    """Print the bytes of LOG, which was written as a stream.

    That is what `dlog log write --stream` does, or a program.
    """

    async def cat(namespace: DirectNamespace) -> None:
        async with (
            await namespace.open_log(log) as manager,
            await manager.open_stream_reader(position) as stream,
        ):
            with Progress(beside=sys.stdout) as progress:
                while data := await stream.read(_CHUNK_BYTES):
                    show_bytes(data)
                    progress.tell("bytes", stream.tell())

    run_direct(cat, is_long=True)
