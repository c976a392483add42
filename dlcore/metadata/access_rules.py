"""The rules of access of a namespace: one node, changed by compare-and-set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dlcore.access.rights import Rule, Rules, changed
from dlcore.base.errors import MetadataConnectionError, MetadataVersionError, NodeExistsError
from dlcore.metadata.following import NodeFollower
from dlcore.metadata.stored import LAYOUT, decode, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore

_ATTEMPTS_MAX = 10
"""Most lost races and lost replies of one change."""


class StoredRules(msgspec.Struct, frozen=True, kw_only=True):
    """The value of the node."""

    layout: int = LAYOUT
    rules: tuple[str, ...] = ()
    """Their texts, in the order in which they were added."""

    def __post_init__(self) -> None:
        Rules(map(Rule.parse, self.rules))


class RuleStore:
    """The rules of one namespace, in the metadata store."""

    def __init__(self, store: MetadataStore, paths: NamespacePaths) -> None:
        self._store = store
        self._path = paths.access_rules

    async def read(self) -> tuple[Rule, ...]:
        """Return the rules, in the order in which they were added.

        Raises: CorruptMetadataError, MetadataConnectionError.
        """
        return (await self._read())[0]

    async def _read(self) -> tuple[tuple[Rule, ...], int | None]:
        node = await self._store.get(self._path, fresh=True)
        if node is None:
            return (), None
        stored = decode(StoredRules, node.value, source=self._path)
        return tuple(map(Rule.parse, stored.rules)), node.version

    async def change(
        self, *, add: Iterable[Rule] = (), remove: Iterable[Rule] = ()
    ) -> tuple[Rule, ...]:
        """Remove rules, then add those that are not there; return the rules.

        Repeated after a lost answer, a change changes nothing.

        Raises:
            ConfigurationError: there are too many.
            CorruptMetadataError, MetadataError.
        """
        added, removed = tuple(add), tuple(remove)
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            before, version = await self._read()
            after = tuple(changed(before, add=added, remove=removed))
            if after == before:
                return after
            Rules(after)
            try:
                await self._write(after, version)
            except (MetadataVersionError, NodeExistsError):
                # Another client was first: read again.
                if attempt == _ATTEMPTS_MAX:
                    raise
            except MetadataConnectionError:
                if (await self._read())[0] != after:
                    raise
                return after
            else:
                return after
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def clear(self) -> None:
        """Remove all rules, damaged ones too: every caller may do everything then.

        Raises: MetadataError.
        """
        node = await self._store.get(self._path, fresh=True)
        if node is not None:
            await self._write((), node.version)

    async def _write(self, rules: tuple[Rule, ...], version: int | None) -> None:
        value = encode(StoredRules(rules=tuple(map(str, rules))))
        if version is None:
            await self._store.create(self._path, value)
        else:
            await self._store.put(self._path, value, version=version)

    def follow(self, look: Callable[[], Awaitable[object]]) -> NodeFollower:
        """Call `look` once soon, and after each change of the rules."""
        return NodeFollower(self._store, self._path, look, what="rules of access")
