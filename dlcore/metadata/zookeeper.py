"""The metadata store on ZooKeeper: the operations of the port, and the users of its nodes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kazoo import exceptions as kazoo_errors

from dlcore.base.access.zookeeper import EVERYBODY
from dlcore.base.background import all_of, together
from dlcore.base.config import SESSION_TIMEOUT_S
from dlcore.base.errors import ConfigurationError, MetadataError, NodeExistsError, NoNodeError
from dlcore.metadata.answers import tell_if_large
from dlcore.metadata.port import (
    ANY_VERSION,
    Create,
    Op,
    Put,
    SessionState,
    Unsubscribe,
    Versioned,
    require_request_size,
)
from dlcore.metadata.requests import MultiRead, call, transaction_of, translate, versioned
from dlcore.metadata.zookeeper_session import ZooKeeperSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.base.access.zookeeper import ZooKeeperAccess


logger = logging.getLogger(__name__)

_READS_AT_ONCE = 500
"""Nodes read in one request; they have at most 1 KB, and readers of larger ones ask for fewer."""
_LISTS_AT_ONCE = 16
"""Lists of children read in one request: at a million logs these have some hundred KB."""
_NOT_TO_BLAME = (kazoo_errors.RolledBackError, kazoo_errors.RuntimeInconsistency)
"""ZooKeeper's errors for the operations of a failed transaction that did not cause the failure."""


class ZooKeeperStore:
    """A session with ZooKeeper; implements `MetadataStore`.  Created by `connect`."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session
        self._client = session.kazoo.client
        self._requests = session.requests
        self.figures = session.figures

    @classmethod
    async def connect(
        cls,
        servers: str,
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        connect_timeout_s: float = SESSION_TIMEOUT_S,
        access: ZooKeeperAccess = EVERYBODY,
    ) -> ZooKeeperStore:
        """Open a session with ZooKeeper at `servers` (``host:port,host:port``).

        `session_timeout_s` is also how long a request waits for its answer.

        Raises:
            MetadataConnectionError: no server answered within `connect_timeout_s`.
            ConfigurationError: a file of `access` cannot be read, or has wrong content.
        """
        times = {"session_timeout_s": session_timeout_s, "connect_timeout_s": connect_timeout_s}
        for key, value in times.items():
            if value <= 0:
                raise ConfigurationError(f"{key}={value!r}: expected seconds > 0")
        session = ZooKeeperSession(servers, session_timeout_s=session_timeout_s, access=access)
        await session.open(connect_timeout_s)
        return cls(session)

    def __repr__(self) -> str:
        return f"<ZooKeeperStore {self._session}>"

    # MetadataStore

    async def get(self, path: str, *, fresh: bool = False) -> Versioned | None:
        """Return the node, or None if there is none."""
        try:
            value, stat = await self._requests.read(
                f"get {path}", lambda: self._client.get_async(path), sync=path if fresh else None
            )
        except NoNodeError:
            return None
        return versioned(value, stat)

    async def get_many(
        self, paths: Sequence[str], *, fresh: bool = False
    ) -> list[Versioned | None]:
        """Return the node of each path, None if there is none."""
        parts = [paths[at : at + _READS_AT_ONCE] for at in range(0, len(paths), _READS_AT_ONCE)]
        results = await together(*(self._get_some(tuple(part), fresh) for part in parts))
        return [node for part in results for node in part]

    async def _get_some(self, paths: tuple[str, ...], fresh: bool) -> list[Versioned | None]:
        found: list[Versioned | None] = await self._requests.read(
            f"get {len(paths)} nodes from {paths[0]}",
            lambda: call(self._client, MultiRead(paths)),
            sync=paths[0] if fresh else None,
        )
        sizes = (len(node.value) for node in found if node is not None)
        tell_if_large(f"{len(paths)} nodes from {paths[0]}", sum(sizes))
        return found

    async def get_children_many(self, paths: Sequence[str]) -> list[list[str] | None]:
        """Return the sorted names of each node's children, None where there is no node."""
        parts = [paths[at : at + _LISTS_AT_ONCE] for at in range(0, len(paths), _LISTS_AT_ONCE)]
        results = await together(*(self._list_some(tuple(part)) for part in parts))
        return [names for part in results for names in part]

    async def _list_some(self, paths: tuple[str, ...]) -> list[list[str] | None]:
        what = f"children of {len(paths)} nodes from {paths[0]}"
        request = MultiRead(paths, children=True)
        found = await self._requests.read(f"get {what}", lambda: call(self._client, request))
        tell_if_large(f"the {what}", sum(len(name) for names in found for name in names or ()))
        return [None if names is None else sorted(names) for names in found]

    async def get_children(self, path: str, *, fresh: bool = False) -> list[str] | None:
        """Return the sorted names of the node's children, or None if there is no node."""
        try:
            names = await self._requests.read(
                f"get children of {path}",
                lambda: self._client.get_children_async(path),
                sync=path if fresh else None,
            )
        except NoNodeError:
            return None
        tell_if_large(f"the children of {path}", sum(map(len, names)))
        return sorted(names)

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, make_parents: bool = False
    ) -> None:
        """Create a node, at version 0; with `make_parents` also the missing ones above it."""

        def start() -> Any:
            return self._client.create_async(path, value, ephemeral=ephemeral)

        require_request_size([Create(path, value)])
        try:
            await self._requests.write(f"create {path}", start)
        except NoNodeError as error:
            above = path.rpartition("/")[0]
            if not make_parents or not above:
                raise NoNodeError(f"cannot create {path}: {above} does not exist") from error
            await self._make_parents(above)
            await self._requests.write(f"create {path}", start)

    async def _make_parents(self, path: str) -> None:
        try:
            await self.create(path, make_parents=True)
        except NodeExistsError:
            logger.debug("created by another client: path=%s", path)

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        """Compare-and-set the value; return the new version."""
        require_request_size([Put(path, value, version)])
        stat = await self._requests.write(
            f"put {path}", lambda: self._client.set_async(path, value, version)
        )
        return int(stat.version)

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        """Delete a node without children."""
        await self._requests.write(
            f"delete {path}", lambda: self._client.delete_async(path, version)
        )

    async def multi(self, ops: Sequence[Op]) -> None:
        """Apply all of `ops` in order, or none; raise the error of the first that fails."""
        if not ops:
            return
        require_request_size(frozen := tuple(ops))
        results = await self._requests.write(
            f"a transaction of {len(frozen)} operations from {frozen[0].path}",
            lambda: transaction_of(self._client, frozen).commit_async(),
        )
        for op, result in zip(frozen, results, strict=True):
            if isinstance(result, Exception) and not isinstance(result, _NOT_TO_BLAME):
                raise translate(result, f"{type(op).__name__.lower()} {op.path}") from result
        if any(isinstance(result, Exception) for result in results):
            raise MetadataError(f"a transaction of {len(frozen)} operations failed: {results}")

    async def secure(self, path: str) -> None:
        """Give a node to the user of this session alone, as those that it makes."""
        assert self._client.default_acl
        await self._requests.write(
            f"secure {path}", lambda: self._client.set_acls_async(path, self._client.default_acl)
        )

    async def sync(self, path: str) -> None:
        """Make all later reads and watches see every write completed before this call."""
        await self._requests.read(f"sync {path}", lambda: self._client.sync_async(path))

    def watch(
        self, path: str, callback: Callable[[], None], *, children: bool = True
    ) -> Unsubscribe:
        """Call `callback` on the loop after `path` or its list of children may have changed."""
        self._session.require_open()
        return self._session.watches.add(path, callback, children=children)

    def on_session(self, callback: Callable[[SessionState], None]) -> Unsubscribe:
        """Call `callback` on the loop at every change of the session's state."""
        self._session.require_open()
        return self._session.states.subscribe(callback)

    @property
    def session_state(self) -> SessionState:
        """The current state."""
        return self._session.states.now

    @property
    def session_token(self) -> str:
        """Text that differs between any two sessions."""
        return self._session.token

    async def aclose(self) -> None:
        """End the session; its ephemeral nodes vanish at once."""
        await self._session.aclose()


_AT_ONCE = 500


async def secure_tree(store: ZooKeeperStore, root: str) -> int:
    """Give every node from `root` down to the user of the session alone; return their number.

    A node comes before those below it.  Therefore others can make no new ones there meanwhile.

    Raises:
        MetadataError: a node is another user's; those before it are secured.
    """
    count, level = 0, [root]
    while level:
        below: list[str] = []
        for at in range(0, len(level), _AT_ONCE):
            found = await all_of(*(_secure(store, path) for path in level[at:][:_AT_ONCE]))
            count += sum(names is not None for names in found)
            for path, names in zip(level[at:][:_AT_ONCE], found, strict=True):
                below += [f"{path}/{name}" for name in names or ()]
        level = below
    return count


async def _secure(store: ZooKeeperStore, path: str) -> list[str] | None:
    """Return the names below a node that is secured now; None: it is gone."""
    try:
        await store.secure(path)
    except NoNodeError:
        return None
    return await store.get_children(path, fresh=True)
