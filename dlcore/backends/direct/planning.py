"""Plans to read many logs, whose ranges are read from bookies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from dlcore.api.planning import ScanPlanning
from dlcore.backends.direct.opened_namespace import DirectOpenedNamespace
from dlcore.backends.direct.scanning import scan_entries
from dlcore.base.config import require
from dlcore.log.reading.schemas import find_schemas, find_targets
from dlcore.log.reading.snapshot import find_places
from dlcore.log.typed.schema import schemas_to_write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import pyarrow as pa

    from dlcore.base.errors import DLError
    from dlcore.base.ids import DLSN
    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.log.context import LogContext
    from dlcore.log.reading.scan import LogSnapshot, ScanBatch, ScanRange


class DirectPlanning(DirectOpenedNamespace, ScanPlanning):
    """Reads of many logs; snapshots of earlier calls are kept, and followed."""

    @override
    async def get_snapshots(
        self, names: Sequence[str], *, fresh: bool = False
    ) -> dict[str, LogSnapshot | None]:
        return await self.followers.take(names, fresh=fresh)

    @override
    async def survey_logs(self, names: Sequence[str]) -> dict[str, LogSnapshot | DLError]:
        found = await self.followers.survey(names, fresh=True)
        return {name: outcome for name, outcome in found.items() if outcome is not None}

    @override
    async def get_schemas(
        self, names: Sequence[str], *, for_write: bool = False
    ) -> dict[str, pa.Schema | None]:
        self._require_open()
        logs = self.log_context.logs
        if for_write:
            return schemas_to_write(await find_targets(logs, names))
        return await find_schemas(logs, names)

    @override
    async def find_places(
        self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
    ) -> list[RecordPlace]:
        self._require_open()
        return await find_places(self.log_context, wanted)

    @override
    def scan(self, part: ScanRange) -> AsyncGenerator[ScanBatch, None]:
        async def current() -> LogContext:
            return self.log_context

        self._require_open()
        return scan_entries(part, self.ports.ledgers, current, self.log_context.encryption_keys)

    @override
    async def grant(
        self, parts: Sequence[Sequence[ScanRange]], *, lifetime_s: int = 3600
    ) -> list[tuple[bytes, ...]]:
        from dlcore.base.access.capability import LIFETIME_S_MAX
        from dlcore.metadata.capability_keys import ensure_keys

        self._require_open()
        require(
            condition=0 < lifetime_s <= LIFETIME_S_MAX,
            key="lifetime_s",
            value=lifetime_s,
            rule=f"expected 1 … {LIFETIME_S_MAX}",
        )
        ring = await ensure_keys(self.ports.store, self.log_context.paths, self.log_context.clock)
        now_s = self.log_context.clock.now_ms() // 1000
        signer = ring.signer(now_s)
        return [
            signer.sign_all(
                (grant for scan in part for grant in scan.grants()), expires_s=now_s + lifetime_s
            )
            for part in parts
        ]
