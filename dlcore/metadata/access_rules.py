"""The rules of access of a namespace: one node, changed by compare-and-set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dlcore.base.access.rights import Rule, Rules, changed
from dlcore.metadata.one_node import NodeFollower, change_node
from dlcore.metadata.stored import LAYOUT, decode, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Versioned


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
        return self._rules_in(await self._store.get(self._path, fresh=True))

    def _rules_in(self, node: Versioned | None) -> tuple[Rule, ...]:
        if node is None:
            return ()
        return tuple(map(Rule.parse, decode(StoredRules, node.value, source=self._path).rules))

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

        def change(node: Versioned | None) -> tuple[tuple[Rule, ...], bytes | None]:
            before = self._rules_in(node)
            after = tuple(changed(before, add=added, remove=removed))
            if after == before:
                return after, None
            Rules(after)
            return after, encode(StoredRules(rules=tuple(map(str, after))))

        return await change_node(self._store, self._path, change)

    async def clear(self) -> None:
        """Remove all rules, damaged ones too: every caller may do everything then.

        Raises: MetadataError.
        """

        def change(node: Versioned | None) -> tuple[None, bytes | None]:
            return None, None if node is None else encode(StoredRules())

        await change_node(self._store, self._path, change)

    def follow(self, look: Callable[[], Awaitable[object]]) -> NodeFollower:
        """Call `look` once soon, and after each change of the rules."""
        return NodeFollower(self._store, self._path, look, what="rules of access")
