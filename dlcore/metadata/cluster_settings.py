"""The settings of a cluster: one node, changed by compare-and-set and followed by processes.

They count before the settings that a process was started with, and take effect within moments.  A
value that one process refuses, for example one of another release, changes nothing there: it says
so in its log, and goes on as before.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from dlcore.base.config import NEW_LOG_SETTINGS, LogSettings
from dlcore.base.errors import ConfigurationError, CorruptMetadataError
from dlcore.metadata.one_node import NodeFollower, change_node
from dlcore.metadata.stored import LAYOUT, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Versioned

logger = logging.getLogger(__name__)

Value: TypeAlias = bool | int | float | str
Tables: TypeAlias = dict[str, dict[str, Value]]
"""Settings by the table of their program, and their key."""


class StoredClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The value of the node."""

    layout: int = LAYOUT
    tables: Tables = {}


def changed_tables(tables: Tables, changes: Mapping[tuple[str, str], Value | None]) -> Tables:
    """Return the settings after changes, by table and key; None removes one."""
    found = {table: dict(values) for table, values in tables.items()}
    for (table, key), value in changes.items():
        if value is None:
            found.get(table, {}).pop(key, None)
        else:
            found.setdefault(table, {})[key] = value
    return {table: values for table, values in found.items() if values}


def _with_defaults(given: LogSettings, values: Mapping[str, object]) -> LogSettings:
    """Return the settings of a new log: all of `NEW_LOG_SETTINGS`, unless it sets one itself.

    Raises: ConfigurationError: a value is wrong.
    """
    unset = LogSettings()
    if any(getattr(given, key) != getattr(unset, key) for key in NEW_LOG_SETTINGS):
        return given
    return given.changed({key: values[key] for key in NEW_LOG_SETTINGS if key in values})


class ClusterSettingsStore:
    """The settings of one namespace's cluster."""

    def __init__(self, store: MetadataStore, paths: NamespacePaths) -> None:
        self._store = store
        self._path = paths.cluster_settings

    async def read(self) -> Tables:
        """Return the settings.  Raises: CorruptMetadataError, MetadataError."""
        return self._tables_in(await self._store.get(self._path, fresh=True))

    def _tables_in(self, node: Versioned | None) -> Tables:
        if node is None:
            return {}
        return decode(StoredClusterSettings, node.value, source=self._path).tables

    async def change(
        self,
        changes: Mapping[tuple[str, str], Value | None],
        check: Callable[[Tables], object],
    ) -> Tables:
        """Change settings by table and key; return all.

        Args:
            changes: the new values; None removes a setting.
            check: raises `ConfigurationError` for settings that must not be stored.

        Raises:
            ConfigurationError: of `check`; nothing was changed.
            CorruptMetadataError, MetadataError.
        """

        def change(node: Versioned | None) -> tuple[Tables, bytes | None]:
            before = self._tables_in(node)
            after = changed_tables(before, changes)
            check(after)
            return after, None if after == before else encode(StoredClusterSettings(tables=after))

        return await change_node(self._store, self._path, change)

    async def settings_of_new_log(self, given: LogSettings) -> LogSettings:
        """Return the settings of a new log: those given, and of the cluster what they lack.

        They are stored with the log, so nothing that the cluster says later removes its records.
        Values that cannot be used get a line in the program's log, and give nothing.

        Raises: MetadataError: the store failed.
        """
        try:
            return _with_defaults(given, (await self.read()).get("log", {}))
        except (ConfigurationError, CorruptMetadataError) as error:
            logger.error(  # noqa: TRY400  not ours
                "the settings of the cluster give nothing to a new log, which keeps all records: "
                "%s; to do: correct them with dlog cluster settings, then dlog log settings",
                error,
            )
            return given

    def follow(self, table: str, apply: Callable[[Mapping[str, Value]], object]) -> NodeFollower:
        """Call `apply` with the settings of a program's table, once soon and after each change.

        An error of `apply` is logged.
        """

        async def look() -> None:
            values = (await self.read()).get(table, {})
            try:
                apply(values)
            except ConfigurationError as error:
                logger.error(  # noqa: TRY400  not ours
                    "the settings of the cluster are not used here, and the earlier ones count: "
                    "%s; to do: correct them with dlog cluster settings",
                    error,
                )

        return NodeFollower(self._store, self._path, look, what="settings of the cluster")
