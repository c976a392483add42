"""The node of a redaction that is not finished: what was replaced, so that all of it is removed.

It is written by the transactions that replace extents, and removed when no old copy is left.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dlcore.base.errors import UnsupportedError
from dlcore.base.ids import LogId
from dlcore.metadata.port import Put
from dlcore.metadata.stored import LAYOUT, Count, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import Versioned

LEDGERS_MAX = 50_000
"""One node of the metadata store holds all ledger ids, and a node may have a megabyte."""


class StoredRedaction(msgspec.Struct, frozen=True, kw_only=True):
    """A redaction of a log.

    `shape` has the conditions without their literals, which may be about a person.  `digest` is the
    digest of `salt` and the whole text; it shows that a command is the same one.  `ledgers` has the
    ledgers that were replaced, and those that are removed with them.
    """

    layout: int = LAYOUT
    name: str
    log_id: LogId
    token: str
    begun_ms: Count
    shape: str
    salt: str
    digest: str
    rows: Count = 0
    segments: tuple[Count, ...] = ()
    ledgers: tuple[Count, ...] = ()
    objects: Count = 0
    """Objects that were deleted."""


@dataclass(frozen=True, slots=True)
class VersionedRedaction:
    """A redaction as it is stored."""

    stored: StoredRedaction
    path: str
    version: int

    def put(
        self,
        *,
        rows: int = 0,
        segments: Iterable[int] = (),
        ledgers: Iterable[int] = (),
        objects: int = 0,
    ) -> Put:
        """Return the operation that adds what was done.

        Raises:
            UnsupportedError: there are too many ledgers for one node.
        """
        stored = self.stored
        replaced = tuple(sorted({*stored.ledgers, *ledgers}))
        if len(replaced) > LEDGERS_MAX:
            raise UnsupportedError(
                f"log {stored.name!r}: more than {LEDGERS_MAX} ledgers are replaced: let a worker "
                "of auto-recovery merge its small extents first"
            )
        return Put(
            self.path,
            encode(
                replace(
                    stored,
                    rows=stored.rows + rows,
                    segments=tuple(sorted({*stored.segments, *segments})),
                    ledgers=replaced,
                    objects=stored.objects + objects,
                )
            ),
            self.version,
        )


def digest_of(text: str, salt: str) -> str:
    """Return the digest of the conditions, as SHA-256 in hexadecimal digits."""
    return hashlib.sha256(f"{salt}:{text}".encode()).hexdigest()


def redaction_in(
    paths: NamespacePaths, log_id: str, node: Versioned | None
) -> VersionedRedaction | None:
    """Return the redaction in a log's node; None if there is none."""
    if node is None:
        return None
    path = paths.redaction(log_id)
    return VersionedRedaction(decode(StoredRedaction, node.value, source=path), path, node.version)
