"""A trial of a whole namespace: a record is written to a log of its own, and read back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import UnexpectedError
from dlcore.base.records import LogRecord

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace


def trial_log(role: str, host: str, port: int) -> str:
    """Return the name of the log for trials of one process; a restart has the same one."""
    return f"dlog-trial/{role}-{host.replace(':', '_')}-{port}"


async def try_log(namespace: DirectNamespace, name: str) -> None:
    """Append a record, read it, and truncate what earlier trials wrote.

    The log keeps one record.  Its creation, lock, segment and ledger are tried as well.

    Raises:
        DLError: something of that failed; UnexpectedError: another record was read.
    """
    clock = namespace.log_context.clock
    written = LogRecord(clock.now_ms(), clock.new_token().encode())
    log = await namespace.open_log(name, create_if_missing=True)
    async with await log.open_writer() as writer:
        dlsn = await writer.write(written)
    async with await log.open_reader(dlsn=dlsn) as reader:
        found = await reader.read_next()
    if found is None or (found.txid, found.payload) != (written.txid, written.payload):
        raise UnexpectedError(f"log {name!r} at {dlsn}: read {found!r}, expected {written!r}")
    await log.truncate(dlsn)
