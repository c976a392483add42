"""Reads and changes the metadata of logs: consistent reads, guarded writes, lost replies.

A lost reply says nothing about the outcome.  `apply` then reads the head.  Its version shows
whether the change was not applied (then it is tried again), was applied, or was overtaken.  The
last is reported as a lost compare-and-set, so that the caller plans again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from dlcore.base.config import NO_TIER, LogSettings, require_kind
from dlcore.base.errors import (
    CorruptMetadataError,
    LogExistsError,
    LogNotFoundError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.base.features import COLD_SEGMENTS, TIER_SETTINGS
from dlcore.base.ids import validate_log_name, validate_log_names
from dlcore.log.metadata.changes import Change, plan_create, plan_settings
from dlcore.log.metadata.nodes import head_of, schema_of, settings_of
from dlcore.log.metadata.values import LockHolder, LogKey, LogMetadata, VersionedHead
from dlcore.metadata.one_node import RETRY_DELAYS_S, persistently
from dlcore.metadata.paths import BUCKETS, LogPaths, NamespacePaths, unescape
from dlcore.metadata.port import CONFLICTS, UNANSWERED, MetadataStore, Put, Versioned
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from dlcore.log.typed.schema import LogSchema


Target: TypeAlias = "tuple[VersionedHead, LogSchema | None]"
_Read: TypeAlias = "Callable[[Sequence[str]], Awaitable[Sequence[Versioned | None]]]"

_KNOWN_MAX = 1000
"""Most logs whose metadata are kept as a guess to which log a name leads."""


def existing(paths: Sequence[str], nodes: Sequence[Versioned | None]) -> list[LogMetadata]:
    """Return the logs whose names have these paths, from the first of the nodes."""
    return [
        decode(LogMetadata, node.value, source=path)
        for path, node in zip(paths, nodes, strict=False)
        if node is not None
    ]


class TargetLookup:
    """Finds the heads and schemas of logs by their names, and remembers which log a name led to.

    `read` returns fresh nodes of paths in one round trip, None for those that are not there.
    """

    def __init__(self, paths: NamespacePaths, read: _Read) -> None:
        self._paths = paths
        self._read = read
        self._known: dict[str, LogMetadata] = {}
        """The log to which each of the last names led, the latest last."""

    async def find(self, names: Sequence[str]) -> dict[str, Target]:
        """Return head and schema of those of the logs that exist.

        Names lead to logs, and logs to heads: two round trips.  Heads of the logs that the names
        led to before come with the names, in one: they are as fresh, and count if the names still
        lead there.
        """
        paths = [self._paths.log(name) for name in validate_log_names(names)]
        guesses = {name: self._known[name] for name in names if name in self._known}
        nodes = await self._read([*paths, *self._paths_of(guesses)])
        logs = {log.name: log for log in existing(paths, nodes)}
        found = {
            name: target
            for name, target in self._among(guesses, nodes[len(paths) :]).items()
            if guesses[name] == logs.get(name)
        }
        others = {name: log for name, log in logs.items() if log != guesses.get(name)}
        if others:
            found |= self._among(others, await self._read(self._paths_of(others)))
        self._remember(names, logs)
        return {name: found[name] for name in logs if name in found}

    def _paths_of(self, logs: Mapping[str, LogMetadata]) -> list[str]:
        heads = [self._paths.log_of(log.log_id).head for log in logs.values()]
        typed = [log for log in logs.values() if log.typed]
        return [*heads, *(self._paths.log_of(log.log_id).schema for log in typed)]

    def _among(
        self, logs: Mapping[str, LogMetadata], nodes: Sequence[Versioned | None]
    ) -> dict[str, Target]:
        """Return what is in the nodes of `_paths_of`, without logs that were deleted."""
        of_typed = iter(nodes[len(logs) :])
        found = {}
        for (name, log), node in zip(logs.items(), nodes, strict=False):
            schema = next(of_typed) if log.typed else None
            with contextlib.suppress(LogNotFoundError):
                at = head_of(self._paths, log, node)
                found[name] = at, schema_of(self._paths, log, schema) if log.typed else None
        return found

    def _remember(self, names: Sequence[str], logs: Mapping[str, LogMetadata]) -> None:
        for name in names:
            # Taken out first, so that it is behind the others: the oldest ones are forgotten.
            self._known.pop(name, None)
        self._known.update(logs)
        for name in [*self._known][:-_KNOWN_MAX]:
            del self._known[name]


_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


async def _read_many(store: MetadataStore, paths: Sequence[str]) -> Sequence[Versioned | None]:
    return await persistently(lambda: store.get_many(paths, fresh=True))


class WriterLocks:
    """The locks that writers have on the logs of one namespace, as others see them."""

    def __init__(self, store: MetadataStore, paths: NamespacePaths) -> None:
        self._store = store
        self._paths = paths

    async def holder_of(self, log: LogKey) -> LockHolder | None:
        """Return the holder of a log's lock; None if it is free."""
        path, node = await self._read(log)
        return None if node is None else decode(LockHolder, node.value, source=path)

    async def break_one(self, log: LogKey, owner: str) -> bool:
        """Delete the writer lock of `owner`, a process that is gone; return whether it was deleted.

        A lock of this session is not deleted.  The lock only keeps writers from disturbing each
        other; safety does not depend on it: a writer without the lock is fenced by the next
        writer's recovery.  This also holds for a writer that takes the lock between the read and
        the deletion.  For its sake a deletion without an answer is not repeated.
        """
        path, node = await self._read(log)
        if node is None or node.session == self._store.session_token:
            return False
        if decode(LockHolder, node.value, source=path).owner != owner:
            return False
        try:
            await self._store.delete(path, version=node.version)
        except (NoNodeError, MetadataVersionError, *UNANSWERED):
            return False  # it is gone, another's, or the outcome is unknown
        return True

    async def _read(self, log: LogKey) -> tuple[str, Versioned | None]:
        path = self._paths.log_of(log.log_id).lock
        return path, await persistently(lambda: self._store.get(path, fresh=True))


class LogStore:
    """The logs of one namespace, in the metadata store."""

    def __init__(self, store: MetadataStore, paths: NamespacePaths) -> None:
        self._store = store
        self._paths = paths
        self._targets = TargetLookup(paths, partial(_read_many, store))
        self.locks = WriterLocks(store, paths)

    @property
    def metadata_store(self) -> MetadataStore:
        """The session of this store."""
        return self._store

    def paths_of(self, log: LogKey) -> LogPaths:
        """Return the paths of a log."""
        return self._paths.log_of(log.log_id)

    async def create(
        self, log: LogMetadata, settings: LogSettings, schema: LogSchema | None = None
    ) -> None:
        """Create an empty log; a typed one with its schema.

        Raises:
            LogExistsError: there is a log of that name, with another id.
            UnsupportedError: a setting needs a feature that was not finalized.
        """
        require_kind("settings", settings, LogSettings)
        await self._require_features(settings)
        path = self._paths.log(log.name)
        try:
            await self._store.multi(plan_create(self._paths, log, settings, schema))
        except (NodeExistsError, *UNANSWERED) as error:
            found = await persistently(lambda: self._store.get(path, fresh=True))
            if found is None and isinstance(error, UNANSWERED):
                raise
            # With this id it was created by this call, or by an earlier one whose answer was lost.
            if found is None or decode(LogMetadata, found.value, source=path).log_id != log.log_id:
                raise LogExistsError(f"log {log.name!r} exists") from error

    async def exists(self, name: str) -> bool:
        """Return whether there is a log `name`."""
        path = self._paths.log(name)
        return await persistently(lambda: self._store.get(path, fresh=True)) is not None

    async def list_names(self, parent: str) -> list[str]:
        """Return the unescaped names of the nodes in all buckets below `parent`."""
        paths = [f"{parent}/{bucket}" for bucket in BUCKETS]
        lists = await persistently(lambda: self._store.get_children_many(paths))
        return [unescape(name) for names in lists for name in names or ()]

    async def find(self, name: str, log_id: str | None = None) -> LogMetadata:
        """Return the fixed metadata of the log `name`.

        With an id it is the log of that id, whatever its present name.

        Raises:
            LogNotFoundError: there is no such log.
        """
        if log_id is None:
            return (await self.find_many([name]))[0]
        found = await self.find_existing([name])
        if found and found[0].log_id == log_id:
            return found[0]
        return await self.find_again(LogKey(name=name, log_id=log_id))

    async def find_again(self, log: LogKey) -> LogMetadata:
        """Return the fixed metadata of a log, whatever its present name.

        Raises:
            LogNotFoundError: the log was deleted; one created again is another log.
        """
        version = -1
        while True:
            at = await self.read(log)
            name = at.head.name or log.name
            with contextlib.suppress(LogNotFoundError):
                found = await self.find(name)
                if found.log_id == log.log_id:
                    return found
            if at.version == version:
                raise CorruptMetadataError(
                    f"log {name!r} (id {log.log_id}): the node of its name is missing, or that of "
                    "another log"
                )
            version = at.version  # it was renamed or deleted meanwhile: read its head again

    async def find_many(self, names: Sequence[str]) -> list[LogMetadata]:
        """Return the fixed metadata of each log, all in one round trip.

        Raises:
            LogNotFoundError: one of them does not exist.
        """
        found = await self.find_existing(names)
        if len(found) < len(names):
            existing = {log.name for log in found}
            missing = next(name for name in names if validate_log_name(name) not in existing)
            raise LogNotFoundError(f"log {missing!r} does not exist in {self._paths.root}")
        return found

    async def find_existing(self, names: Sequence[str]) -> list[LogMetadata]:
        """Return the fixed metadata of those of the logs that exist, in their order."""
        paths = [self._paths.log(name) for name in validate_log_names(names)]
        return existing(paths, await _read_many(self._store, paths))

    async def read(self, log: LogKey) -> VersionedHead:
        """Return the log's head, with every change that completed before this call.

        Raises:
            LogNotFoundError: the log was deleted; one created again is another log.
        """
        path = self.paths_of(log).head
        return self.head_of(log, await persistently(lambda: self._store.get(path, fresh=True)))

    def head_of(self, log: LogKey, node: Versioned | None) -> VersionedHead:
        """Return the head in a node, or raise `LogNotFoundError`."""
        return head_of(self._paths, log, node)

    async def open(self, log: LogKey) -> tuple[VersionedHead, LogSettings]:
        """Return the log's head, as `read` does, and its settings, in one round trip."""
        paths = self.paths_of(log)
        head, node = await persistently(
            lambda: self._store.get_many([paths.head, paths.settings], fresh=True)
        )
        return self.head_of(log, head), self.settings_of(log, node)

    def settings_of(self, log: LogKey, node: Versioned | None) -> LogSettings:
        """Return the settings in a node."""
        return settings_of(self._paths, log, node)

    async def read_settings(self, log: LogKey) -> LogSettings:
        """Return the settings of a log."""
        return (await self.read_settings_of([log]))[0]

    async def read_settings_of(self, logs: Sequence[LogKey]) -> list[LogSettings]:
        """Return the settings of each log, all in one round trip."""
        paths = [self.paths_of(log).settings for log in logs]
        nodes = await persistently(lambda: self._store.get_many(paths, fresh=True))
        return [self.settings_of(log, node) for log, node in zip(logs, nodes, strict=True)]

    async def update_settings(self, log: LogKey, changes: Mapping[str, object]) -> LogSettings:
        """Store changes of a log's settings; return all settings.

        If the stored settings are damaged, the changes are applied to the defaults.

        Raises:
            ConfigurationError: there is no such setting, or it cannot have that value.
            LogNotFoundError: the log was deleted.
            UnsupportedError: a setting needs a feature that was not finalized.
        """
        paths = self.paths_of(log)
        for delay_s in RETRY_DELAYS_S:
            head, node = await persistently(
                lambda: self._store.get_many([paths.head, paths.settings], fresh=True)
            )
            self.head_of(log, head)
            damaged = None
            try:
                known = self.settings_of(log, node)
            except CorruptMetadataError as error:
                if not changes:
                    raise
                logger.warning(
                    "damaged settings are replaced: %s; to do: dlog log settings, to see whether "
                    "all that is wanted is there",
                    error,
                )
                known, damaged = LogSettings(), await self._listed_settings(log)
            settings = known.changed(changes)
            await self._require_features(settings)
            ops = plan_settings(self._paths, log, node, settings, known=damaged)
            if not damaged and (settings == known or not ops):
                return settings
            try:
                await self._store.multi(ops)
            except (*CONFLICTS, *UNANSWERED):
                await asyncio.sleep(delay_s)
            else:
                return settings
        raise MetadataConnectionError(
            f"log {log.name!r}: its settings could not be changed: each attempt had a conflict, or "
            "got no answer"
        )

    async def _require_features(self, settings: LogSettings) -> None:
        needed = {
            COLD_SEGMENTS: settings.tier is not None,
            TIER_SETTINGS: settings.table is not None or settings.tier == NO_TIER,
        }
        if any(needed.values()):
            from dlcore.metadata.binding import ClusterFeatures  # few settings need it

            features = ClusterFeatures(self._store, self._paths)
            for feature in (feature for feature, is_needed in needed.items() if is_needed):
                await features.require(feature)

    async def _listed_settings(self, log: LogKey) -> LogSettings:
        """Return what else is known of a log's settings: whether it has a retention."""
        path = self._paths.retained_log(log.log_id)
        node = await persistently(lambda: self._store.get(path, fresh=True))
        # Any retention will do: the plan asks only whether the log was on the list.
        return LogSettings(retention_s=None if node is None else 1.0)

    async def read_schemas(self, logs: Sequence[LogMetadata]) -> list[LogSchema | None]:
        """Return the schema of each log; None for byte logs, for which nothing is read.

        Raises:
            LogNotFoundError: a typed log was deleted.
        """
        paths = {log.log_id: self.paths_of(log).schema for log in logs if log.typed}
        if not paths:
            return [None] * len(logs)
        nodes = await persistently(lambda: self._store.get_many(list(paths.values()), fresh=True))
        found = dict(zip(paths, nodes, strict=True))
        return [
            schema_of(self._paths, log, found[log.log_id]) if log.typed else None for log in logs
        ]

    async def find_targets(self, names: Sequence[str]) -> dict[str, Target]:
        """Return head and schema of those of the logs that exist; see `TargetLookup`."""
        return await self._targets.find(names)

    async def change_schema(
        self, log: LogKey, change: Callable[[LogSchema], LogSchema]
    ) -> LogSchema:
        """Store the result of `change` as a typed log's schema, and return it.

        Raises:
            LogNotFoundError: the log was deleted.
            Exception: any error that `change` raises.
        """
        path = self.paths_of(log).schema
        for delay_s in RETRY_DELAYS_S:
            node = await persistently(lambda: self._store.get(path, fresh=True))
            known = schema_of(self._paths, log, node)
            schema = change(known)
            if schema is known:
                return schema
            assert node is not None
            try:
                await self._store.multi([Put(path, encode(schema), node.version)])
            except (NoNodeError, MetadataVersionError, *UNANSWERED):
                await asyncio.sleep(delay_s)
            else:
                return schema
        raise MetadataConnectionError(
            f"log {log.name!r}: its schema could not be changed: each attempt had a conflict, or "
            "got no answer"
        )

    async def apply(self, change: Change) -> VersionedHead:
        """Apply a planned change; return the head after it.

        Raises:
            MetadataVersionError: the log changed since it was read, or this change was applied and
                overtaken: read it and plan again.
            LogNotFoundError: the log is gone.
        """
        after = change.after
        for delay_s in RETRY_DELAYS_S:
            try:
                await self._store.multi(change.ops)
            except UNANSWERED:
                # If not, it may still be applied later. To send it again does no harm: the version
                # of the head lets only one of the two succeed.
                if await persistently(lambda: self._is_applied(change)):
                    return after
                await asyncio.sleep(delay_s)
            except CONFLICTS as error:
                if not after.head.deleted:
                    await self.read(after.log)  # raises if the log is gone
                raise MetadataVersionError(
                    f"log {after.name!r} was changed by another client: {error}"
                ) from error
            else:
                return after
        raise MetadataConnectionError(
            f"log {after.name!r}: the metadata store did not answer to a change"
        )

    async def _is_applied(self, change: Change) -> bool:
        """Return whether `change` is the stored state; False if the log is as it was before.

        Raises:
            MetadataVersionError: the stored state is neither.
        """
        after = change.after
        node = await self._store.get(self.paths_of(after.log).head, fresh=True)
        if node is not None and node.version == after.version - 1:
            return False
        if node is not None and node.version == after.version and node.value == encode(after.head):
            return True
        raise MetadataVersionError(f"log {after.name!r} was changed by another client")
