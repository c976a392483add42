"""The metadata store port: a tree of small versioned values, in ZooKeeper's terms.

Paths are absolute (``/dlog/logs/…``).  A node's version starts at 0 and counts its writes; a node
that is deleted and created again starts at 0 again.  The parents of a node must exist, except with
`make_parents`.

`MetadataConnectionError` from a write means *unknown*: it may have taken effect.  Callers find out
by reading back a token or a version; the store never repeats a write.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from dlcore.base.errors import (
    MetadataConnectionError,
    MetadataSessionExpiredError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
    TransactionTooLargeError,
)
from dlcore.base.metrics import Durations

ANY_VERSION = -1
"""Write or delete with any version."""
REQUEST_BYTES_MAX = 1_000_000
"""ZooKeeper closes the connection at a request above 1 MB (jute.maxbuffer).  To the client this
looks like a missing answer."""
_OP_OVERHEAD_BYTES = 64
"""Most bytes of an operation in a request beside its path and value: header, ACL, flags."""

CONFLICTS = (MetadataVersionError, NodeExistsError, NoNodeError)
"""A write that ended in one of these was not applied: another client was first."""
UNANSWERED = (MetadataConnectionError, MetadataSessionExpiredError)
"""A write that ended in one of these may or may not have been applied."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """A node's value and version.

    Attributes:
        session: the token of the session that owns an ephemeral node, "" for a permanent one.
        created: the number of the transaction that created it; transactions are numbered in their
            order, from 1; 0: the server does not number them.
        changed: the number of the transaction that wrote its value last.
        children: how many children it has.
    """

    value: bytes
    version: int
    session: str = ""
    created: int = field(default=0, compare=False, repr=False)
    changed: int = field(default=0, compare=False, repr=False)
    children: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Create:
    """Create `path`; `NodeExistsError` if it exists, `NoNodeError` if its parent does not."""

    path: str
    value: bytes = b""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Put:
    """Set the value of `path` if it has `version`, else `MetadataVersionError` or `NoNodeError`."""

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
    """Refuse operations that a metadata store would not accept in one request.

    Raises:
        TransactionTooLargeError: the request is too large.
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
    """State of the session; SUSPENDED: no contact now, EXPIRED: its ephemeral nodes are gone."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    EXPIRED = "expired"


class StoreFigures:
    """The counts of a store since it was opened.

    Attributes:
        sessions_lost: how often its session expired.
        requests: the durations of requests, from the call to the answer.
    """

    def __init__(self) -> None:
        self.sessions_lost = 0
        self.requests = Durations()


Unsubscribe: TypeAlias = Callable[[], None]


class MetadataStore(Protocol):
    """A session with the store.  All its errors are `MetadataError`s.

    After a session has expired the store opens a new one by itself.  The ephemeral nodes of the old
    session are gone; their creators have to create them again (`on_session`).

    A write that is too large for one request raises `TransactionTooLargeError`: nothing is sent.

    The server that answers a read may be behind the others.  With `fresh` the answer includes all
    writes of all clients that completed before the call.  This still takes one round trip.
    """

    async def get(self, path: str, *, fresh: bool = False) -> Versioned | None:
        """Return the node, or None if there is none."""
        ...

    async def get_many(
        self, paths: Sequence[str], *, fresh: bool = False
    ) -> list[Versioned | None]:
        """Return the node of each path, None if there is none, in one round trip.

        The nodes are not from one moment: something may change between two of them.
        """
        ...

    async def get_children(self, path: str, *, fresh: bool = False) -> list[str] | None:
        """Return the sorted names of the node's children, or None if there is no node."""
        ...

    async def get_children_many(self, paths: Sequence[str]) -> list[list[str] | None]:
        """Return what `get_children` returns of each path, in few round trips.

        The lists are not from one moment.  Together they should have less than a megabyte.
        """
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

        Without `children`, changes of the list of children need not be reported.

        It is level-triggered: a call means "read again", and does not say what happened.  It is
        also called after a new session or a reconnection, and once soon after subscribing.  Several
        changes may cause one call.
        """
        ...

    def on_session(self, callback: Callable[[SessionState], None]) -> Unsubscribe:
        """Call `callback` on the event loop at every change of the session's state."""
        ...

    @property
    def session_state(self) -> SessionState:
        """The current state."""
        ...

    @property
    def session_token(self) -> str:
        """Text that differs between any two sessions."""
        ...

    @property
    def figures(self) -> StoreFigures:
        """Counts for operators."""
        ...

    async def aclose(self) -> None:
        """End the session; its ephemeral nodes vanish at once."""
        ...
