"""The metadata store port: a tree of small versioned values, in ZooKeeper's terms.

Paths are absolute (``/dlog/logs/…``).  A node's version starts at 0 and counts its writes; a node
that is deleted and created again starts at 0 again.  The parents of a node must exist, except where
`make_parents` says otherwise.

`MetadataConnectionError` from a write means *unknown*: it may have taken effect.  Callers classify
by reading back a token or a version; the store never retries a write by itself.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from dlcore.errors import TransactionTooLargeError

ANY_VERSION = -1
"""Write or delete whatever the version is."""
REQUEST_BYTES_MAX = 1_000_000
"""ZooKeeper closes the connection on a request above 1 MB (jute.maxbuffer), which looks as if it
had not answered."""
_OP_OVERHEAD_BYTES = 64
"""What an operation takes in a request beyond its path and value, at most: header, ACL, flags."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """A node's value and version.

    `session` is the token of the session that an ephemeral node dies with, "" of one that stays.
    """

    value: bytes
    version: int
    session: str = ""


@dataclass(frozen=True, slots=True)
class Create:
    """Create `path`; `NodeExistsError` if it exists, `NoNodeError` if its parent does not."""

    path: str
    value: bytes = b""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Put:
    """Set the value of `path` if it has `version`; `MetadataVersionError` or `NoNodeError` else."""

    path: str
    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete `path` if it has `version` and no children."""

    path: str
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class Check:
    """Require that `path` exists with `version`."""

    path: str
    version: int


Op: TypeAlias = Create | Put | Delete | Check


def require_request_size(ops: Sequence[Op]) -> None:
    """Refuse what a metadata store would not take in one request.

    Raises:
        TransactionTooLargeError: it is too large.
    """
    size = sum(
        len(op.path.encode())
        + len(op.value if isinstance(op, Create | Put) else b"")
        + _OP_OVERHEAD_BYTES
        for op in ops
    )
    if size > REQUEST_BYTES_MAX:
        raise TransactionTooLargeError(
            f"a metadata transaction of {len(ops)} operations from {ops[0].path} would have {size} "
            f"bytes, the metadata store takes {REQUEST_BYTES_MAX} at once"
        )


class SessionState(enum.Enum):
    """The session's state: SUSPENDED means no contact for now, EXPIRED that ephemerals are gone."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    EXPIRED = "expired"


Unsubscribe: TypeAlias = Callable[[], None]


class MetadataStore(Protocol):
    """A session with the store.  Foreign exceptions never escape: all errors are `MetadataError`s.

    After a session expired the store opens a new one by itself; ephemeral nodes of the old one are
    gone and are their creators' to make again (`on_session`).

    A write that no store takes in one request ends in `TransactionTooLargeError`: nothing is sent.

    A server may answer a read that is behind the others.  With `fresh` no write is missed that
    completed before the call, whoever made it; that takes one round trip all the same.
    """

    async def get(self, path: str, *, fresh: bool = False) -> Versioned | None:
        """Return the node, or None if there is none."""
        ...

    async def get_many(
        self, paths: Sequence[str], *, fresh: bool = False
    ) -> list[Versioned | None]:
        """Return the node of each path, or None where there is none: one round trip for all.

        They are not one moment's: something may change between two of them.
        """
        ...

    async def get_children(self, path: str, *, fresh: bool = False) -> list[str] | None:
        """Return the sorted names of the node's children, or None if there is no node."""
        ...

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, make_parents: bool = False
    ) -> None:
        """Create a node, at version 0; with `make_parents` also the missing ones above it."""
        ...

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        """Compare-and-set the value; return the new version."""
        ...

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        """Delete a node without children."""
        ...

    async def multi(self, ops: Sequence[Op]) -> None:
        """Apply all of `ops` in order, or none; raise the error of the first that fails."""
        ...

    async def sync(self, path: str) -> None:
        """Make all later reads and watches see every write completed before this call."""
        ...

    def watch(
        self, path: str, callback: Callable[[], None], *, children: bool = True
    ) -> Unsubscribe:
        """Call `callback` on the event loop after the node or its children may have changed.

        Without `children`, changes of the list of children need not be told.

        Level-triggered: it says "look again", not what happened; it is also called after a new
        session or a reconnection, and once soon after subscribing.  Several changes may give one
        call.
        """
        ...

    def on_session(self, callback: Callable[[SessionState], None]) -> Unsubscribe:
        """Call `callback` on the event loop with every change of the session's state."""
        ...

    @property
    def session_state(self) -> SessionState:
        """The state right now."""
        ...

    @property
    def session_token(self) -> str:
        """Text that differs between any two sessions."""
        ...

    async def aclose(self) -> None:
        """End the session; its ephemeral nodes vanish at once."""
        ...
