"""Requests in kazoo's form, also some that kazoo does not have, and translation of its errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, assert_never

from kazoo import exceptions as kazoo_errors
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol import serialization
from kazoo.protocol.states import ZnodeStat

from dlcore.base.errors import (
    MetadataConnectionError,
    MetadataError,
    MetadataSessionExpiredError,
    MetadataVersionError,
    NodeExistsError,
    NodeNotEmptyError,
    NoNodeError,
)
from dlcore.metadata.port import Check, Create, Delete, Put, Versioned

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from kazoo.client import KazooClient

    from dlcore.metadata.port import Op

_GET_DATA = 4
_GET_CHILDREN = 8
_ANY_WATCHER = 3
_ERRORS: tuple[tuple[type[Exception], type[MetadataError]], ...] = (
    (kazoo_errors.NoNodeError, NoNodeError),
    (kazoo_errors.NodeExistsError, NodeExistsError),
    (kazoo_errors.BadVersionError, MetadataVersionError),
    (kazoo_errors.NotEmptyError, NodeNotEmptyError),
    # Kazoo derives it from SessionExpiredError.
    (kazoo_errors.ConnectionClosedError, MetadataConnectionError),
    (kazoo_errors.SessionExpiredError, MetadataSessionExpiredError),
    (kazoo_errors.ConnectionLoss, MetadataConnectionError),
    (kazoo_errors.OperationTimeoutError, MetadataConnectionError),
    (kazoo_errors.RequestTimeoutError, MetadataConnectionError),
    (KazooTimeoutError, MetadataConnectionError),
    (kazoo_errors.NoAuthError, MetadataError),
)


@dataclass(slots=True, eq=False)
class Request:
    """A request that waits, or is under way."""

    what: str  # operation and path, for errors
    start: Callable[[], Any]  # gives kazoo's IAsyncResult
    reply: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class Sync:
    """A sync, and the waiting reads right behind it."""

    reply: asyncio.Future[Any]
    reads: dict[Request, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Watch:
    """A watch of a caller; one of ZooKeeper stands for all of a path."""

    callback: Callable[[], None]
    children: bool
    is_due: bool = False


def session_token_of(session_id: int) -> str:
    """Return the text that identifies a session, "" for none."""
    return f"zookeeper-{session_id:016x}" if session_id else ""


def versioned(value: bytes, stat: ZnodeStat) -> Versioned:
    """Return a node that was read."""
    return Versioned(
        value,
        stat.version,
        session_token_of(stat.ephemeralOwner),
        created=stat.czxid,
        changed=stat.mzxid,
        children=stat.numChildren,
    )


def _failure_of(code: int) -> Exception:
    error: Exception = kazoo_errors.EXCEPTIONS[code]()
    return error


@dataclass(frozen=True, slots=True)
class RemoveWatches:
    """Remove the watches of this session on a node; `NoWatcherError` if there was none.

    `forget` is called in kazoo's thread, before the answers to later requests are used.
    """

    path: str
    forget: Callable[[str], None]
    type: int = 18

    def serialize(self) -> bytes:
        """Return the bytes of the request."""
        parts = bytearray(serialization.write_string(self.path))
        return bytes(parts + serialization.int_struct.pack(_ANY_WATCHER))

    def deserialize(self, answer: bytes, offset: int) -> None:
        """Note that it is done; the answer is empty."""
        del answer, offset
        self.forget(self.path)


@dataclass(frozen=True, slots=True)
class MultiRead:
    """Read many nodes in one answer; None for a path without a node.

    With `children` the answer has the names of their children, else their values.
    """

    paths: tuple[str, ...]
    children: bool = False
    type: int = 22

    def serialize(self) -> bytes:
        """Return the bytes of the request."""
        parts = bytearray()
        kind = _GET_CHILDREN if self.children else _GET_DATA
        for path in self.paths:
            parts += serialization.MultiHeader(kind, False, -1).serialize()
            parts += serialization.write_string(path)
            parts.append(0)  # no watch
        return bytes(parts + serialization.multiheader_struct.pack(-1, True, -1))

    @classmethod
    def deserialize(cls, answer: bytes, offset: int) -> list[Any]:
        """Return the values (`Versioned`) or names of children of an answer, None for no node."""
        nodes: list[Any] = []
        header, offset = serialization.MultiHeader.deserialize(answer, offset)
        while not header.done:
            if header.type == _GET_DATA:
                value, offset = serialization.read_buffer(answer, offset)
                stat = ZnodeStat._make(serialization.stat_struct.unpack_from(answer, offset))
                offset += serialization.stat_struct.size
                nodes.append(versioned(value or b"", stat))
            elif header.type == _GET_CHILDREN:
                (count,) = serialization.int_struct.unpack_from(answer, offset)
                offset += serialization.int_struct.size
                names = []
                for _ in range(count):
                    name, offset = serialization.read_string(answer, offset)
                    names.append(name)
                nodes.append(names)
            else:
                (code,) = serialization.int_struct.unpack_from(answer, offset)
                offset += serialization.int_struct.size
                if code != kazoo_errors.NoNodeError.code:
                    raise _failure_of(code)
                nodes.append(None)
            header, offset = serialization.MultiHeader.deserialize(answer, offset)
        return nodes


def transaction_of(client: KazooClient, ops: Sequence[Op]) -> Any:
    """Return kazoo's transaction with these operations."""
    transaction = client.transaction()
    for op in ops:
        match op:
            case Create():
                transaction.create(op.path, op.value, ephemeral=op.ephemeral)
            case Put():
                transaction.set_data(op.path, op.value, op.version)
            case Delete():
                transaction.delete(op.path, op.version)
            case Check():
                transaction.check(op.path, op.version)
            case _:
                assert_never(op)
    return transaction


def translate(error: Exception, what: str) -> MetadataError:
    """Return our error for an error of kazoo in the operation `what`."""
    for foreign, ours in _ERRORS:
        if isinstance(error, foreign):
            return ours(f"{what}: {_describe(ours, error)}")
    return MetadataError(f"{what}: {type(error).__name__} {error}".rstrip())


def _describe(ours: type[MetadataError], error: Exception) -> str:
    reasons: dict[type[MetadataError], str] = {
        NoNodeError: "the node does not exist",
        NodeExistsError: "the node exists",
        MetadataVersionError: "the node has another version",
        NodeNotEmptyError: "the node has children",
        MetadataSessionExpiredError: "the session expired",
        MetadataConnectionError: f"no answer from ZooKeeper ({type(error).__name__}), "
        "result unknown",
        MetadataError: "the node is for another user of ZooKeeper: expected zk_auth_file with the "
        "user for whom it was made",
    }
    return reasons[ours]


def call(client: KazooClient, request: MultiRead | RemoveWatches) -> Any:
    """Send a request that kazoo does not have; return its answer in kazoo's form."""
    answer = client.handler.async_result()
    client._call(request, answer)
    return answer
