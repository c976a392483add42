"""ZooKeeper's protocol, as kazoo writes and reads it."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kazoo.protocol import serialization as kazoo
from kazoo.security import make_digest_acl

from dlcore.metadata.port import Check, Create, Delete, Put
from dlcore.metadata.requests import MultiRead, RemoveWatches
from dlcore.metadata.tree import Node
from dlcore.ops.metadata_server import jute
from dlcore.ops.metadata_server.jute import Code, Kind
from tests.dlcore.ops.metadata_server.frames import body, connecting, create, frame


def unwatch(path: str) -> RemoveWatches:
    """Return a request to remove the watches of a path."""
    return RemoveWatches(path, lambda _path: None)


REQUESTS: list[tuple[Any, jute.Request]] = [
    (create("/a", b"x"), jute.Write(7, (Create("/a", b"x"),))),
    (create("/a/é", flags=1), jute.Write(7, (Create("/a/é", ephemeral=True),))),
    (kazoo.SetData("/a", b"y", 3), jute.Write(7, (Put("/a", b"y", 3),))),
    (kazoo.Delete("/a", -1), jute.Write(7, (Delete("/a", -1),))),
    (kazoo.Exists("/a", True), jute.Read(7, Kind.EXISTS, "/a", watches=True)),
    (kazoo.GetData("/a", None), jute.Read(7, Kind.GET, "/a", watches=False)),
    (kazoo.GetChildren("/", None), jute.Read(7, Kind.CHILDREN, "/", watches=False)),
    (kazoo.Sync("/a"), jute.Plain(7, Kind.SYNC, "/a")),
    (unwatch("/a"), jute.Plain(7, Kind.REMOVE_WATCHES, "/a")),
    (kazoo.PingInstance, jute.Plain(7, Kind.PING)),
    (kazoo.CloseInstance, jute.Plain(7, Kind.CLOSE)),
    (MultiRead(("/a", "/b")), jute.ReadMany(7, ((Kind.GET, "/a"), (Kind.GET, "/b")))),
    (MultiRead(("/a",), children=True), jute.ReadMany(7, ((Kind.CHILDREN, "/a"),))),
    (
        kazoo.Transaction([create("/a"), kazoo.CheckVersion("/b", 2), kazoo.Delete("/c", 1)]),
        jute.Write(7, (Create("/a"), Check("/b", 2), Delete("/c", 1)), is_multi=True),
    ),
]


@pytest.mark.parametrize(("sent", "expected"), REQUESTS, ids=lambda each: type(each).__name__)
def test_requests_of_kazoo_are_read(sent: Any, expected: jute.Request) -> None:
    """Each kind, and none of them when its last byte is missing."""
    whole = frame(7, sent)
    assert jute.request_of(whole) == expected
    if len(whole) > 8:
        with pytest.raises(jute.MalformedFrameError, match="ends inside a field"):
            jute.request_of(whole[:-1])


def test_the_first_frame_is_read() -> None:
    """A new session and one to go on with; a frame that is too short is refused."""
    found = jute.connect_of(connecting(session=5, password=b"p" * 16, last_seen=9))
    assert found == jute.Connect(9, 10_000, 5, b"p" * 16)
    with pytest.raises(jute.MalformedFrameError):
        jute.connect_of(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (create("/a", flags=2), Code.UNIMPLEMENTED),
        (create("/a", acl=[make_digest_acl("me", "secret", all=True)]), Code.INVALID_ACL),
        (create("/"), Code.NODE_EXISTS),
        (kazoo.GetACL("/a"), Code.UNIMPLEMENTED),
        (kazoo.CheckVersion("/a", 1), Code.UNIMPLEMENTED),
        (kazoo.Transaction([kazoo.Exists("/a", None)]), Code.UNIMPLEMENTED),
        (kazoo.Transaction([kazoo.Create2("/a", b"", [], 0)]), Code.UNIMPLEMENTED),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_request_that_is_not_served_is_refused_by_its_id(sent: Any, code: Code) -> None:
    """Above all one that would seem to close a node to others."""
    with pytest.raises(jute.RefusedRequestError) as refused:
        jute.request_of(frame(7, sent))
    assert (refused.value.request_id, refused.value.code) == (7, code)


def test_watches_are_removed_of_all_kinds_only() -> None:
    """The protocol can remove those of one kind; dlog never asks for it."""
    whole = frame(7, unwatch("/a"))
    with pytest.raises(jute.RefusedRequestError):
        jute.request_of(whole[:-4] + struct.pack("!i", 1))


def test_only_values_and_children_are_read_many_at_a_time() -> None:
    """The protocol has nothing else there."""
    item = struct.pack("!iBi", Kind.EXISTS, False, -1)
    with pytest.raises(jute.RefusedRequestError):
        jute.request_of(struct.pack("!ii", 7, Kind.MULTI_READ) + item)


@pytest.mark.parametrize("path", ["", "a", "/a/", "//", "/a//b", "/a\0b", "/\udcff"])
def test_a_text_that_is_no_path_is_malformed(path: str) -> None:
    """It would be stored, and no client could reach or list it."""
    coded = path.encode("utf-8", "surrogateescape")
    request = struct.pack("!iii", 7, Kind.SYNC, len(coded)) + coded
    with pytest.raises(jute.MalformedFrameError):
        jute.request_of(request)


def test_the_topmost_node_cannot_be_deleted() -> None:
    """It has no parent."""
    with pytest.raises(jute.MalformedFrameError, match="cannot be deleted"):
        jute.request_of(frame(7, kazoo.Delete("/", -1)))


@given(
    st.one_of(
        st.binary(max_size=60),
        st.builds(
            lambda kind, rest: struct.pack("!ii", 1, kind) + rest,
            st.sampled_from([int(kind) for kind in Kind]),
            st.binary(max_size=60),
        ),
    )
)
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    """Whatever comes is a request, malformed, or refused."""
    with suppress(jute.MalformedFrameError, jute.RefusedRequestError):
        jute.request_of(data)
    with suppress(jute.MalformedFrameError):
        jute.connect_of(data)


def test_answers_are_read_by_kazoo() -> None:
    """A value with its stat, names, and the parts of many answers."""
    node = Node(b"value", 3, owner=5, children={"b": None, "a": None})
    value, stat = body(kazoo.GetData, jute.answer(7, 9, Code.OK, jute.value_of(node)))
    assert value == b"value"
    assert (stat.version, stat.ephemeralOwner, stat.dataLength, stat.numChildren) == (3, 5, 5, 2)
    assert body(kazoo.GetChildren, jute.answer(7, 9, Code.OK, jute.names_of(node))) == ["b", "a"]
    parts = [
        jute.part(Kind.CREATE, jute.text("/a")),
        jute.part(Kind.PUT, jute.stat_of(node)),
        jute.failed_part(Code.NO_NODE),
    ]
    path, changed, error = body(kazoo.Transaction, jute.answer(7, 9, Code.OK, jute.joined(parts)))
    assert (path, changed.version, type(error).__name__) == ("/a", 3, "NoNodeError")
