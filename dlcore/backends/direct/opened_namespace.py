"""A namespace over a metadata store and bookies that was opened."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from typing_extensions import override

from dlcore.api.opened_namespace import OpenedNamespace
from dlcore.base.background import all_of
from dlcore.log.metadata.owner import StagingOwner
from dlcore.log.reading.snapshots import LogFollowers
from dlcore.metadata.access_rules import RuleStore

if TYPE_CHECKING:
    from dlcore.backends.direct.ports import NamespacePorts
    from dlcore.log.context import LogContext
    from dlcore.metadata.capability_keys import FollowedKeys


class DirectOpenedNamespace(OpenedNamespace):
    """The adapters of one namespace, on which all its parts rest, and their end."""

    def __init__(
        self, uri: str, ports: NamespacePorts, context: LogContext, keys: FollowedKeys | None
    ) -> None:
        self._uri = uri
        self._keys = keys
        self.ports = ports
        """The ports of the namespace, for auto-recovery and maintenance; it closes them."""
        self.log_context = context
        """The adapters of its logs, for maintenance; it closes them."""
        self.staging_owner = StagingOwner(context)
        """The node that shows that this process lives, for those that stage and merge."""
        self.followers = LogFollowers(context)
        """The logs with kept snapshots; it closes them."""
        self.access_rules = RuleStore(ports.store, ports.paths)
        """The rules of access, for proxies and maintenance."""

    @property
    @override
    def uri(self) -> str:
        return self._uri

    def _require_open(self) -> None:
        self.log_context.lifetime.require_open()

    @override
    async def aclose(self) -> None:
        if self.log_context.lifetime.has_ended:
            return
        self.log_context.lifetime.has_ended = True
        async with AsyncExitStack() as steps:  # from the last to the first, even if one fails
            steps.push_async_callback(self.ports.store.aclose)
            for keys in (self._keys, self.log_context.encryption_keys):
                if keys is not None:
                    steps.push_async_callback(keys.aclose)
            steps.push_async_callback(self.ports.bookies.aclose)
            steps.push_async_callback(self.ports.registry.aclose)
            steps.push_async_callback(self.ports.ledgers.aclose)
            steps.push_async_callback(self.staging_owner.aclose)
            steps.callback(self.followers.close)
            steps.push_async_callback(self.log_context.tidier.aclose)
            await self._abandon_open_objects()

    async def _abandon_open_objects(self) -> None:
        """Abandon all at once, because each takes a while without a metadata store."""
        opened = self.log_context.open_objects
        await all_of(*(each.abandon("its namespace was closed") for each in opened))
