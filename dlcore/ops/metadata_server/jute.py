"""The part of ZooKeeper's protocol that dlog's client speaks: bytes to requests, answers to bytes.

A frame is a length of four bytes and that many bytes.  The first frame of a connection is a
`Connect`; each later one has an id, a kind and the fields of the kind.  An answer repeats the id.
Source: zookeeper.jute of Apache ZooKeeper 3.9.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

from dlcore.metadata.port import Check, Create, Delete, Put

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.metadata.port import Op
    from dlcore.metadata.tree import Node

FRAME_BYTES_MAX = 1024 * 1024
"""ZooKeeper's own limit (jute.maxbuffer); a larger frame ends the connection."""

_OPEN_ACL = (31, "world", "anyone")
_INT = struct.Struct("!i")
_CONNECT = struct.Struct("!iqiq")
_HEADER = struct.Struct("!ii")
_ANSWER = struct.Struct("!iqi")
_ITEM = struct.Struct("!iBi")
_STAT = struct.Struct("!qqqqiiiqiiq")
NO_STAT = bytes(_STAT.size)
"""The fields about a node that is gone."""
_ALL_WATCHES = 3
_EVENT_ID = -1
_EVENT_STATE = 3  # connected


class Kind(IntEnum):
    """The requests that are served, by their numbers in the protocol."""

    CREATE = 1
    DELETE = 2
    EXISTS = 3
    GET = 4
    PUT = 5
    CHILDREN = 8
    SYNC = 9
    PING = 11
    CHECK = 13
    MULTI = 14
    REMOVE_WATCHES = 18
    MULTI_READ = 22
    CLOSE = -11


class Code(IntEnum):
    """The results of requests, by their numbers in the protocol."""

    OK = 0
    INCONSISTENT = -2
    UNIMPLEMENTED = -6
    NO_NODE = -101
    WRONG_VERSION = -103
    NO_CHILDREN_OF_EPHEMERALS = -108
    NODE_EXISTS = -110
    NOT_EMPTY = -111
    INVALID_ACL = -114
    NO_WATCHER = -121


class Change(IntEnum):
    """The change that a watch tells, by its number in the protocol."""

    CREATED = 1
    DELETED = 2
    VALUE = 3
    CHILDREN = 4


class MalformedFrameError(Exception):
    """Bytes that are no request; the connection ends."""


class RefusedRequestError(Exception):
    """A well-formed request that this server does not serve."""

    def __init__(self, request_id: int, code: Code) -> None:
        super().__init__(request_id, code)
        self.request_id = request_id
        self.code = code


@dataclass(frozen=True, slots=True)
class Connect:
    """The first frame: a new session (`session` 0), or one to go on with."""

    last_seen: int
    """The highest number of a transaction that the client has seen."""
    timeout_ms: int
    session: int
    password: bytes


@dataclass(frozen=True, slots=True)
class Write:
    """Operations to apply together; `is_multi`: the answer has a part for each."""

    request_id: int
    ops: tuple[Op, ...]
    is_multi: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """Read one node: its existence, value or children; `watches`: tell the next change, too."""

    request_id: int
    kind: Kind
    path: str
    watches: bool


@dataclass(frozen=True, slots=True)
class ReadMany:
    """Read the value (GET) or the children of each of many nodes."""

    request_id: int
    wanted: tuple[tuple[Kind, str], ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """A request of few fields: SYNC and REMOVE_WATCHES with a path, PING and CLOSE without."""

    request_id: int
    kind: Kind
    path: str = ""


Request: TypeAlias = Write | Read | ReadMany | Plain


class _Fields:
    """The fields of a frame, in order."""

    def __init__(self, frame: bytes) -> None:
        self._frame = frame
        self._at = 0

    def take(self, size: int) -> bytes:
        taken = self._frame[self._at : self._at + size]
        if size < 0 or len(taken) < size:
            raise MalformedFrameError(f"a frame of {len(self._frame)} bytes ends inside a field")
        self._at += size
        return taken

    def number(self) -> int:
        (number,) = _INT.unpack(self.take(_INT.size))
        return int(number)

    def flag(self) -> bool:
        return self.take(1) != b"\0"

    def data(self) -> bytes:
        size = self.number()
        return b"" if size == -1 else self.take(size)  # -1 stands for null

    def text(self) -> str:
        try:
            return self.data().decode()
        except UnicodeDecodeError as error:
            raise MalformedFrameError(f"a text is not UTF-8: {error}") from error

    def path(self) -> str:
        path = self.text()
        is_whole = path == "/" or (path.startswith("/") and "" not in path[1:].split("/"))
        if not is_whole or "\0" in path:
            raise MalformedFrameError(f"{path!r} is no path: expected /name or /name/name")
        return path


def connect_of(frame: bytes) -> Connect:
    """Return the request of a connection's first frame.

    Raises:
        MalformedFrameError: the frame is something else.
    """
    fields = _Fields(frame)
    _, last_seen, timeout_ms, session = _CONNECT.unpack(fields.take(_CONNECT.size))
    return Connect(last_seen, timeout_ms, session, fields.data())


def request_of(frame: bytes) -> Request:
    """Return the request of a later frame.

    Raises:
        MalformedFrameError: the frame is no request.
        RefusedRequestError: the request is of a kind, or has a property, that is not served.
    """
    fields = _Fields(frame)
    request_id, number = _HEADER.unpack(fields.take(_HEADER.size))
    kind = _kind_of(number, request_id)
    match kind:
        case Kind.CREATE | Kind.DELETE | Kind.PUT:
            return Write(request_id, (_op_of(kind, fields, request_id),))
        case Kind.EXISTS | Kind.GET | Kind.CHILDREN:
            return Read(request_id, kind, fields.path(), fields.flag())
        case Kind.MULTI:
            parts = _parts_of(fields, request_id)
            ops = tuple(_op_of(each, fields, request_id) for each in parts)
            return Write(request_id, ops, is_multi=True)
        case Kind.MULTI_READ:
            parts = _parts_of(fields, request_id)
            return ReadMany(request_id, tuple(_wanted(each, fields, request_id) for each in parts))
        case Kind.SYNC:
            return Plain(request_id, kind, fields.path())
        case Kind.REMOVE_WATCHES:
            path = fields.path()
            if fields.number() != _ALL_WATCHES:
                raise RefusedRequestError(request_id, Code.UNIMPLEMENTED)
            return Plain(request_id, kind, path)
        case Kind.PING | Kind.CLOSE:
            return Plain(request_id, kind)
        case _:  # CHECK, which only transactions have
            raise RefusedRequestError(request_id, Code.UNIMPLEMENTED)


def _parts_of(fields: _Fields, request_id: int) -> Iterator[Kind]:
    """Yield the kind of each part of a transaction; the caller takes its fields in between."""
    while True:
        number, is_end, _ = _ITEM.unpack(fields.take(_ITEM.size))
        if is_end:
            return
        yield _kind_of(number, request_id)


def _kind_of(number: int, request_id: int) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        raise RefusedRequestError(request_id, Code.UNIMPLEMENTED) from None


def _op_of(kind: Kind, fields: _Fields, request_id: int) -> Op:
    path = fields.path()
    match kind:
        case Kind.CREATE:
            return _creation(path, fields, request_id)
        case Kind.PUT:
            return Put(path, fields.data(), fields.number())
        case Kind.DELETE:
            if path == "/":
                raise MalformedFrameError("the node / cannot be deleted")
            return Delete(path, fields.number())
        case Kind.CHECK:
            return Check(path, fields.number())
        case _:
            raise RefusedRequestError(request_id, Code.UNIMPLEMENTED)


def _creation(path: str, fields: _Fields, request_id: int) -> Create:
    if path == "/":
        raise RefusedRequestError(request_id, Code.NODE_EXISTS)
    value = fields.data()
    for _ in range(fields.number()):
        if (fields.number(), fields.text(), fields.text()) != _OPEN_ACL:
            # A client must not believe that a node is closed to others: it would not be.
            raise RefusedRequestError(request_id, Code.INVALID_ACL)
    flags = fields.number()
    if flags not in (0, 1):  # 1: ephemeral; others number the name, or end the node by time
        raise RefusedRequestError(request_id, Code.UNIMPLEMENTED)
    return Create(path, value, ephemeral=flags == 1)


def _wanted(kind: Kind, fields: _Fields, request_id: int) -> tuple[Kind, str]:
    if kind not in (Kind.GET, Kind.CHILDREN):
        raise RefusedRequestError(request_id, Code.UNIMPLEMENTED)
    path = fields.path()
    fields.flag()  # no watch, by the protocol
    return kind, path


# Answers


def framed(body: bytes) -> bytes:
    """Return the frame of an answer."""
    return _INT.pack(len(body)) + body


def connected(timeout_ms: int, session: int, password: bytes) -> bytes:
    """Return the answer to `Connect`; with 0 as time-out and session: the session has expired."""
    head = struct.pack("!iiq", 0, timeout_ms, session)
    return framed(head + _data(password) + b"\0")


def answer(request_id: int, number: int, code: Code, body: bytes = b"") -> bytes:
    """Return an answer; `number` is that of the latest transaction."""
    return framed(_ANSWER.pack(request_id, number, code) + body)


def event(change: Change, path: str) -> bytes:
    """Return what a watch tells."""
    body = struct.pack("!ii", change, _EVENT_STATE) + text(path)
    return framed(_ANSWER.pack(_EVENT_ID, -1, Code.OK) + body)


def text(value: str) -> bytes:
    """Return a field with text."""
    return _data(value.encode())


def value_of(node: Node) -> bytes:
    """Return the fields of a value that was read."""
    return _data(node.value) + stat_of(node)


def names_of(node: Node) -> bytes:
    """Return the field with the names of a node's children."""
    return _INT.pack(len(node.children)) + b"".join(map(text, node.children))


def stat_of(node: Node) -> bytes:
    """Return a node's fields about itself; times of transactions are not kept: 0."""
    sizes = (len(node.value), len(node.children))
    numbers = (node.created, node.changed)
    return _STAT.pack(*numbers, 0, 0, node.version, 0, 0, node.owner or 0, *sizes, 0)


def part(kind: Kind, body: bytes = b"") -> bytes:
    """Return one part of the answer to many operations or reads."""
    return _ITEM.pack(kind, False, Code.OK) + body


def failed_part(code: Code) -> bytes:
    """Return one part that failed, or that was not applied because another one failed."""
    return _ITEM.pack(-1, False, code) + _INT.pack(code)


def joined(parts: Sequence[bytes]) -> bytes:
    """Return the parts and their end."""
    return b"".join(parts) + _ITEM.pack(-1, True, -1)


def _data(value: bytes) -> bytes:
    return _INT.pack(len(value)) + value
