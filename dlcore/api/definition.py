"""The definition of a log: the settings and columns that all its writers and readers share."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from dlcore.api.opened_log import OpenedLog

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore.base.config import LogSettings


class LogDefinition(OpenedLog):
    """The settings and the schema that are stored with one log; running writers follow a change."""

    async def get_settings(self) -> LogSettings:
        """Return the settings that are stored with the log for its writers.

        Raises: LogNotFoundError, MetadataError.
        """
        return await self.update_settings()

    @abstractmethod
    async def update_settings(self, /, **changes: object) -> LogSettings:
        """Change settings that are stored with the log, by name (`LogSettings`); return all.

        None unsets a setting.  Running writers use the change within moments.

        Raises:
            ConfigurationError: there is no such setting, or it cannot have that value.
        """

    @abstractmethod
    async def get_schema(self) -> pa.Schema | None:
        """Return the columns of a typed log; None for a byte log.

        Raises: LogNotFoundError, MetadataError.
        """

    @abstractmethod
    async def update_schema(self, schema: Any, *, merge: bool = False) -> pa.Schema:
        """Change the columns of a typed log; return all columns after the change.

        Columns may be added, which are null in older records, and types may get wider; see
        `dlcore.log.typed.schema`.  Readers and writers learn of the change when they meet it.

        Args:
            schema: all columns, as an Arrow schema.
            merge: keep columns of the log that are missing here, and types that are wider.  Proxies
                only merge.

        Raises:
            SchemaMismatchError: the change is not of this kind; the message shows both schemas.
            ConfigurationError: a log cannot have these columns.
        """
