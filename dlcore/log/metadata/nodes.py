"""Nodes of logs and staged ledgers: their values, and the operations that count extents.

Nothing here does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.base.config import LogSettings
from dlcore.base.errors import CorruptMetadataError, LogNotFoundError
from dlcore.log.metadata.values import LogHead, StagedLedger, StoredSettings, VersionedHead
from dlcore.log.typed.schema import LogSchema
from dlcore.metadata.port import Create, Delete, Op, Put
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from dlcore.log.metadata.values import LogKey
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import Versioned

_WRITTEN = ":written"
"""The identity of ledgers that no append staged."""


def head_of(paths: NamespacePaths, log: LogKey, node: Versioned | None) -> VersionedHead:
    """Return the log's head in a node, or raise `LogNotFoundError`."""
    if node is not None:
        head = decode(LogHead, node.value, source=paths.log_of(log.log_id).head)
        if not head.deleted:
            return VersionedHead(log=log, head=head, version=node.version)
    raise LogNotFoundError(
        f"log {log.name!r} was deleted; if there is one of that name again, it is another one"
    )


def settings_of(paths: NamespacePaths, log: LogKey, node: Versioned | None) -> LogSettings:
    """Return the log's settings in a node."""
    if node is None:
        return LogSettings()
    path = paths.log_of(log.log_id).settings
    return decode(StoredSettings, node.value, source=path).settings


def schema_of(paths: NamespacePaths, log: LogKey, node: Versioned | None) -> LogSchema:
    """Return a typed log's schema in a node, or raise `LogNotFoundError`."""
    if node is None:
        raise LogNotFoundError(f"log {log.name!r} was deleted")
    return decode(LogSchema, node.value, source=paths.log_of(log.log_id).schema)


@dataclass(frozen=True, slots=True)
class StagedNode:
    """A registration as it is stored."""

    staged: StagedLedger
    path: str
    version: int

    def put(self, staged: StagedLedger) -> Put:
        """Return the operation that replaces it."""
        return Put(self.path, encode(staged), self.version)


def decode_node(paths: NamespacePaths, ledger_id: int, node: Versioned | None) -> StagedNode | None:
    """Return the registration in the node of a ledger; None if it has none."""
    if node is None:
        return None
    path = paths.staged_ledger(ledger_id)
    staged = decode(StagedLedger, node.value, source=path)
    if staged.ledger_id != ledger_id or not staged.identity:
        raise CorruptMetadataError(
            f"{path} holds the registration of {staged.ledger_id}, staged by {staged.identity!r}"
        )
    return StagedNode(staged, path, node.version)


def release(paths: NamespacePaths, node: StagedNode, staged: StagedLedger) -> list[Op]:
    """Return the operations that store a registration with fewer extents, or remove the ledger.

    It is removed when it is settled and its last extent is released; later if there were merges.
    """
    if staged.extents or not staged.settled:
        return [node.put(staged)]
    if staged.released_ms:
        return [node.put(staged), Create(paths.merged_ledger(staged.ledger_id))]
    return [Delete(node.path, node.version), Delete(paths.ledger(staged.ledger_id))]


def register_merged(paths: NamespacePaths, ledger_id: int, *, now_ms: int) -> list[Op]:
    """Return the operations that register a ledger that lost its only extent to a merge.

    A writer had filled it, and its extents were not counted.
    """
    staged = StagedLedger(
        ledger_id=ledger_id,
        identity=_WRITTEN,
        owner="",
        created_ms=now_ms,
        settled=True,
        released_ms=now_ms,
    )
    return [
        Create(paths.staged_ledger(ledger_id), encode(staged)),
        Create(paths.merged_ledger(ledger_id)),
    ]
