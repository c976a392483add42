"""Which ledgers are proven deleted: twice, some time apart, and never too many at once.

Absence alone proves nothing: a metadata store that lost its data, or a bug in listing it, would
make every ledger look deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from bookie.config import GarbageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageVerdict:
    """What one pass proved."""

    deleted: frozenset[int]
    refused: str
    """Why the whole pass was refused; empty if it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageReport:
    """What one garbage collection did."""

    ledgers_seen: int
    ledgers_deleted: int
    files_deleted: int
    bytes_freed: int
    refused: str
    """Why the pass was refused as a whole; empty if it was not."""


class GarbageJudge:
    """Remembers since when each ledger looks deleted; pure, the time is passed in."""

    def __init__(self, config: GarbageConfig) -> None:
        self._config = config
        self._deleted_since_ms: dict[int, int] = {}

    def judge(
        self, *, seen: Collection[int], looks_deleted: Collection[int], now_ms: int
    ) -> GarbageVerdict:
        """Take one pass over the ledgers `seen`, and return those that are now proven deleted.

        A refused pass counts for nothing: it neither starts nor confirms a suspicion.
        """
        count, total = len(looks_deleted), len(seen)
        if count > self._config.brake_count and count > self._config.brake_share * total:
            return GarbageVerdict(
                deleted=frozenset(),
                refused=(
                    f"{count} of {total} ledgers look deleted, more than the brake allows "
                    f"({self._config.brake_count} and a share of {self._config.brake_share}); "
                    "if they really are, raise brake_count"
                ),
            )
        since = self._deleted_since_ms
        # A clock that went backwards starts the age anew: it must not confirm anything early.
        self._deleted_since_ms = {
            ledger_id: min(since.get(ledger_id, now_ms), now_ms) for ledger_id in looks_deleted
        }
        deleted = frozenset(
            ledger_id
            for ledger_id in looks_deleted
            if ledger_id in since
            and now_ms - self._deleted_since_ms[ledger_id] >= self._config.age_ms
        )
        for ledger_id in deleted:
            del self._deleted_since_ms[ledger_id]
        return GarbageVerdict(deleted=deleted, refused="")
