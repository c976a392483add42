"""Frames of the other end of ZooKeeper's protocol, made and read by kazoo."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from kazoo.protocol import serialization as kazoo
from kazoo.security import OPEN_ACL_UNSAFE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kazoo.security import ACL


def frame(request_id: int, request: Any) -> bytes:
    """Return the frame of a request, without its length."""
    return struct.pack("!ii", request_id, request.type) + bytes(request.serialize())


def connecting(
    *, session: int = 0, password: bytes = bytes(16), timeout_ms: int = 10_000, last_seen: int = 0
) -> bytes:
    """Return the first frame of a connection."""
    return bytes(kazoo.Connect(0, last_seen, timeout_ms, session, password, False).serialize())


def create(
    path: str, value: bytes = b"", *, flags: int = 0, acl: Sequence[ACL] = OPEN_ACL_UNSAFE
) -> Any:
    """Return a request to create a node."""
    return kazoo.Create(path, value, acl, flags)


def connected(data: bytes) -> Any:
    """Return the answer to a first frame."""
    found, _ = kazoo.Connect.deserialize(data, 4)
    return found


def header(data: bytes) -> tuple[int, int, int]:
    """Return the id, the number of the transaction and the code of an answer."""
    assert int.from_bytes(data[:4]) == len(data) - 4
    found, _ = kazoo.ReplyHeader.deserialize(data, 4)
    return found.xid, found.zxid, found.err


def body(kind: Any, data: bytes) -> Any:
    """Return the rest of an answer, as kazoo reads it."""
    return kind.deserialize(data, 20)


def news(data: bytes) -> tuple[int, str]:
    """Return the kind of change, and the path, that a watch tells."""
    assert header(data) == (-1, -1, 0)
    found, _ = kazoo.Watch.deserialize(data, 20)
    return found.type, found.path
