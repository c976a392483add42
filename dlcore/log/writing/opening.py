"""Creates the writer of a locked log, after recovery and with the state that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError
from dlcore.log.metadata.changes import require_unsealed
from dlcore.log.recovery import recover_log
from dlcore.log.writing.typed import DirectTypedWriter
from dlcore.log.writing.writer import DirectWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.base.config import LogConfig
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.writing.lock import WriterLock
    from dlcore.log.writing.port import WriterExtension


_OWN_METADATA = {"log", "log_id"}
_LEDGER_METADATA_BYTES_MAX = 4096


def checked_metadata(given: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata that an application wants stored with each ledger of its writer.

    Raises:
        ConfigurationError: it has keys that dlog itself uses, or is too large.
    """
    if taken := _OWN_METADATA & given.keys():
        raise ConfigurationError(
            f"ledger_metadata: {sorted(taken)} are keys that dlog sets itself: expected others"
        )
    size = sum(len(text.encode()) for text in (*given, *given.values()))
    if size > _LEDGER_METADATA_BYTES_MAX:
        raise ConfigurationError(
            f"ledger_metadata: {size} bytes of keys and values, expected at most "
            f"{_LEDGER_METADATA_BYTES_MAX}, because each ledger stores them"
        )
    return dict(given)


async def open_locked(
    context: LogContext,
    log: LogMetadata,
    lock: WriterLock | None,
    config: LogConfig,
    ledger_metadata: Mapping[str, str],
    extension: WriterExtension | None,
) -> DirectWriter:
    """Recover a dead writer's segment of a log whose lock is held, and return the writer.

    An `extension` is restored from the log.

    Raises:
        EndOfStreamError: it is sealed.
        InvalidEntryError: `extension` cannot be restored, for the stamp of an entry is impossible.
        LedgerRecoveryError, LedgerReadError, MetadataError: the state cannot be found now.
    """
    # Read under the lock: another writer may have changed the log since it was opened.
    at, settings = await context.logs.open(log)
    (schema,) = await context.logs.read_schemas([log])
    at = await recover_log(context, at)
    require_unsealed(at)  # the owner before us may have sealed it when it released the lock
    if extension is not None:
        await extension.restore(context, at)
    state = context, log, at, lock, config, settings, ledger_metadata, extension
    if schema is None:
        return DirectWriter(*state)
    return DirectTypedWriter(*state, schema=schema)
