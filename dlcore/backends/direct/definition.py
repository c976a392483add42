"""The settings and the schema of a log, in the metadata store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dlcore.api.definition import LogDefinition
from dlcore.backends.direct.opened_log import DirectOpenedLog
from dlcore.log.reading.schemas import KnownSchemas
from dlcore.log.typed.arrow import columns_of, schema_from, schema_of

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore.base.config import LogSettings
    from dlcore.log.typed.schema import LogSchema


class DirectDefinition(DirectOpenedLog, LogDefinition):
    """The definition of one log."""

    @override
    async def get_settings(self) -> LogSettings:
        self._require_open()
        return await self._context.logs.read_settings(self._log)

    @override
    async def update_settings(self, /, **changes: object) -> LogSettings:
        self._require_open()
        return await self._context.logs.update_settings(self._log, changes)

    @override
    async def get_schema(self) -> pa.Schema | None:
        self._require_open()
        schemas = await KnownSchemas.read(self._context.logs, self._log)
        return None if schemas is None else schemas.entries.columns

    @override
    async def update_schema(self, schema: Any, *, merge: bool = False) -> pa.Schema:
        self._require_open()
        self._require_typed()
        columns = columns_of(schema_from(schema))
        name = self.name

        def change(known: LogSchema) -> LogSchema:
            return known.merged(name, columns) if merge else known.evolved(name, columns)

        return schema_of((await self._context.logs.change_schema(self._log, change)).latest)
