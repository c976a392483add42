"""The decisions of the metadata server, one event after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from kazoo.protocol import serialization as kazoo

from dlcore.metadata.requests import MultiRead, RemoveWatches
from dlcore.metadata.tree import Tree
from dlcore.ops.metadata_server import service as service_module
from dlcore.ops.metadata_server.jute import Change, Code
from dlcore.ops.metadata_server.service import (
    End,
    Lost,
    MetadataService,
    Received,
    Send,
    Session,
    Store,
    Turn,
)
from tests.dlcore.ops.metadata_server.frames import (
    body,
    connected,
    connecting,
    create,
    frame,
    header,
    news,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.ops.metadata_server.service import Effect, Event


class World:
    """A service, its time, and what it sent on each connection."""

    def __init__(self, *sessions: Session, number: int = 0) -> None:
        self.service = MetadataService(Tree(), sessions, number=number, now_s=0.0)
        self.now_s = 0.0
        self.stored: list[Store] = []

    def handle(self, event: Event) -> list[Effect]:
        """Let an event happen; the notice of a change must come after it is stored."""
        effects = self.service.handle(event)
        self.service.validate()
        self.stored += [each for each in effects if isinstance(each, Store)]
        return effects

    def receive(self, connection: int, data: bytes) -> list[Effect]:
        """Receive a frame."""
        return self.handle(Received(connection, data, self.now_s, b"%016d" % connection))

    def connect(self, connection: int, **fields: Any) -> Any:
        """Begin a session, or go on with one; return the answer."""
        *_, last = self.receive(connection, connecting(**fields))
        assert isinstance(last, Send)
        return connected(last.data)

    def ask(self, connection: int, request: Any) -> list[Effect]:
        """Send a request."""
        return self.receive(connection, frame(7, request))

    def code(self, connection: int, request: Any) -> int:
        """Send a request; return the code of its answer."""
        return header(answer_of(self.ask(connection, request)))[2]

    def pass_time(self, seconds: float) -> list[Effect]:
        """Let time pass, turn by turn; return all effects."""
        effects = []
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            effects += self.handle(Turn(self.now_s))
        return effects


def answer_of(effects: Sequence[Effect]) -> bytes:
    """Return the one answer to a request."""
    (found,) = [
        each.data for each in effects if isinstance(each, Send) and header(each.data)[0] == 7
    ]
    return found


def notices(effects: Sequence[Effect]) -> list[tuple[int, int, str]]:
    """Return the notices of watches: connection, kind of change, path."""
    sent = [each for each in effects if isinstance(each, Send)]
    return [(each.connection, *news(each.data)) for each in sent if header(each.data)[0] == -1]


def test_a_change_is_stored_before_anybody_hears_of_it() -> None:
    """The answer to the writer and the news to a watcher come after the write to disk."""
    world = World()
    world.connect(1)
    world.connect(2)
    world.ask(2, kazoo.Exists("/a", True))
    first, second, third = world.ask(1, create("/a", b"x"))
    assert isinstance(first, Store)
    assert first.nodes["/a"] is not None
    assert notices([second]) == [(2, Change.CREATED, "/a")]
    assert header(answer_of([third])) == (7, first.number, 0)


def test_a_new_session_is_stored_and_its_timeout_bounded() -> None:
    """A client that wants a year gets a minute, one that wants nothing a second."""
    world = World()
    assert world.connect(1, timeout_ms=2**31 - 1).time_out == 60_000
    assert world.connect(2, timeout_ms=0).time_out == 1_000
    found = world.connect(3, timeout_ms=5_000)
    begun = world.stored[-1].begun
    assert begun == Session(found.session_id, b"%016d" % 3, 5.0)
    assert len({each.number for each in world.stored}) == 3


def test_a_client_goes_on_with_its_session_on_another_connection() -> None:
    """The older connection ends; its loss later changes nothing."""
    world = World()
    found = world.connect(1)
    identity = {"session": found.session_id, "password": found.passwd}
    world.ask(1, create("/mine", flags=1))
    effects = world.receive(2, connecting(**identity))
    assert effects[0] == End(1, "its session came by another connection")
    world.handle(Lost(1))
    assert world.code(2, kazoo.Exists("/mine", None)) == 0
    world.handle(Lost(2))
    assert world.connect(3, **identity).session_id == found.session_id


@pytest.mark.parametrize("wrong", [{"session": 12345}, {"password": b"guess".ljust(16)}])
def test_no_client_goes_on_with_the_session_of_another(wrong: dict[str, Any]) -> None:
    """A session that is over, and a wrong password, get the same answer, and the end."""
    world = World()
    found = world.connect(1)
    identity = {"session": found.session_id, "password": found.passwd} | wrong
    sent, end = world.receive(2, connecting(**identity))
    assert isinstance(sent, Send)
    assert (connected(sent.data).time_out, end) == (0, End(2))
    assert world.code(1, kazoo.Sync("/a")) == 0


def test_sessions_outlive_a_restart_and_have_their_whole_timeout_again() -> None:
    """The service begins with what is stored."""
    kept = Session(4, b"p" * 16, 10.0)
    world = World(kept, number=9)
    world.pass_time(9)
    assert world.connect(1, session=4, password=b"p" * 16, last_seen=9).session_id == 4
    world.pass_time(9)
    assert world.code(1, kazoo.Sync("/a")) == 0
    effects = world.pass_time(10.5)
    assert [each.ended for each in effects if isinstance(each, Store)] == [4]
    assert End(1, "its session was silent for too long") in effects


def test_a_client_that_saw_more_than_is_here_is_refused() -> None:
    """The folder is an older copy: it would lose changes that the client knows."""
    (end,) = World(number=3).receive(1, connecting(last_seen=4))
    assert isinstance(end, End)
    assert "transaction 4, the latest here is 3" in end.reason


def test_a_silent_session_ends_with_its_nodes_and_watchers_hear_of_it() -> None:
    """Also where its connection was lost before."""
    world = World()
    world.connect(1, timeout_ms=2_000)
    world.connect(2, timeout_ms=60_000)
    world.ask(1, create("/mine", flags=1))
    world.ask(2, kazoo.GetChildren("/", True))
    world.ask(2, kazoo.GetData("/mine", True))
    world.handle(Lost(1))
    assert not world.pass_time(1.5)
    effects = world.pass_time(1)
    assert effects[0] == Store(effects[0].number, {"/mine": None}, ended=1)  # type: ignore[union-attr]
    assert notices(effects) == [(2, Change.DELETED, "/mine"), (2, Change.CHILDREN, "/")]
    assert not [each for each in effects if isinstance(each, End)]


def test_a_pause_of_the_server_is_no_silence_of_its_clients() -> None:
    """After a minute without a turn each session still has what was left."""
    world = World()
    world.connect(1, timeout_ms=2_000)
    world.now_s = 60.0
    assert not world.handle(Turn(60.0))
    assert not world.pass_time(1.5)
    assert world.pass_time(1)


def test_a_closed_session_ends_at_once() -> None:
    """Its nodes vanish, it gets its answer, and then the connection ends."""
    world = World()
    world.connect(1)
    world.ask(1, create("/mine", flags=1))
    stored, sent, end = world.ask(1, kazoo.CloseInstance)
    assert isinstance(stored, Store)
    assert (stored.nodes, stored.ended, end) == ({"/mine": None}, 1, End(1))
    assert header(answer_of([sent]))[2] == 0
    world.connect(2)
    assert world.code(2, kazoo.Exists("/mine", None)) == Code.NO_NODE


def test_each_error_has_its_code() -> None:
    """As clients of ZooKeeper know them; nothing is stored."""
    world = World()
    world.connect(1)
    for made in (create("/a"), create("/a/b"), create("/own", flags=1)):
        assert world.code(1, made) == 0
    before = len(world.stored)
    assert world.code(1, create("/a")) == Code.NODE_EXISTS
    assert world.code(1, create("/x/y")) == Code.NO_NODE
    assert world.code(1, create("/own/y")) == Code.NO_CHILDREN_OF_EPHEMERALS
    assert world.code(1, kazoo.Delete("/a", -1)) == Code.NOT_EMPTY
    assert world.code(1, kazoo.SetData("/a", b"", 9)) == Code.WRONG_VERSION
    assert world.code(1, kazoo.GetData("/none", None)) == Code.NO_NODE
    assert world.code(1, kazoo.GetACL("/a")) == Code.UNIMPLEMENTED
    assert len(world.stored) == before


def test_a_transaction_tells_what_each_part_did() -> None:
    """Also a value that a later part deletes."""
    world = World()
    world.connect(1)
    world.ask(1, create("/a"))
    parts = [
        create("/b"),
        kazoo.SetData("/a", b"x", 0),
        kazoo.SetData("/b", b"x", 0),
        kazoo.CheckVersion("/b", 1),
        kazoo.Delete("/b", 1),
    ]
    effects = world.ask(1, kazoo.Transaction(parts))
    path, changed, gone, *flags = body(kazoo.Transaction, answer_of(effects))
    assert (path, changed.version, gone.version, flags) == ("/b", 1, 0, [True, True])
    stored = world.stored[-1].nodes
    assert stored["/b"] is None
    assert stored["/a"] is not None


def test_a_transaction_that_fails_names_the_part_to_blame() -> None:
    """Those before it would have done, those after it were not tried; nothing is stored."""
    world = World()
    world.connect(1)
    before = len(world.stored)
    parts = [create("/a"), kazoo.CheckVersion("/none", 0), create("/b")]
    results = body(kazoo.Transaction, answer_of(world.ask(1, kazoo.Transaction(parts))))
    names = [type(each).__name__ for each in results]
    assert names == ["RolledBackError", "NoNodeError", "RuntimeInconsistency"]
    assert world.code(1, kazoo.Exists("/a", None)) == Code.NO_NODE
    assert len(world.stored) == before


def test_many_values_or_lists_come_in_one_answer() -> None:
    """None where there is no node."""
    world = World()
    world.connect(1)
    world.ask(1, create("/a", b"x"))
    data = answer_of(world.ask(1, MultiRead(("/a", "/none"))))
    found, missing = MultiRead.deserialize(data, 20)
    assert found is not None
    assert (found.value, missing) == (b"x", None)
    data = answer_of(world.ask(1, MultiRead(("/", "/none"), children=True)))
    assert MultiRead.deserialize(data, 20) == [["a"], None]


def test_a_watch_tells_one_change() -> None:
    """Watches of the value, of the children, and of the end, for which one notice is enough."""
    world = World()
    world.connect(1)
    world.connect(2)
    world.ask(1, create("/a"))
    world.ask(2, kazoo.GetData("/a", True))
    assert notices(world.ask(1, kazoo.SetData("/a", b"1", -1))) == [(2, Change.VALUE, "/a")]
    assert notices(world.ask(1, kazoo.SetData("/a", b"2", -1))) == []
    world.ask(2, kazoo.GetChildren("/a", True))
    assert notices(world.ask(1, create("/a/b"))) == [(2, Change.CHILDREN, "/a")]
    world.ask(1, kazoo.Delete("/a/b", -1))
    world.ask(2, kazoo.GetChildren("/a", True))
    world.ask(2, kazoo.Exists("/a", True))
    assert notices(world.ask(1, kazoo.Delete("/a", -1))) == [(2, Change.DELETED, "/a")]


def test_only_existence_is_watched_where_there_is_no_node() -> None:
    """As in ZooKeeper: the others fail and leave no watch."""
    world = World()
    world.connect(1)
    for asked in (kazoo.GetData("/a", True), kazoo.GetChildren("/a", True)):
        assert world.code(1, asked) == Code.NO_NODE
    assert notices(world.ask(1, create("/a"))) == []


def test_watches_are_removed_by_their_client_and_end_with_the_connection() -> None:
    """Two clients watch one path; each one's watch is its own."""
    world = World()
    for connection in (1, 2, 3):
        world.connect(connection)
    unwatch = RemoveWatches("/a", lambda _path: None)
    for connection in (2, 3):
        world.ask(connection, kazoo.Exists("/a", True))
    assert world.code(2, unwatch) == 0
    assert world.code(2, unwatch) == Code.NO_WATCHER
    assert world.code(1, unwatch) == Code.NO_WATCHER
    world.handle(Lost(3))
    assert notices(world.ask(1, create("/a"))) == []


def test_the_watches_of_a_connection_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks for more is ended, and leaves nothing."""
    monkeypatch.setattr(service_module, "_WATCHES_MAX", 2)
    world = World()
    world.connect(1)
    for path in ("/a", "/b"):
        world.ask(1, kazoo.Exists(path, True))
    (end,) = world.ask(1, kazoo.Exists("/c", True))
    assert end == End(1, "it asked for more than 2 watches")
    world.connect(2)
    assert notices(world.ask(2, create("/a"))) == []


def test_bytes_that_are_no_request_end_the_connection_only() -> None:
    """The session goes on by another one."""
    world = World()
    found = world.connect(1)
    (end,) = world.receive(1, b"\0")
    assert isinstance(end, End)
    assert "ends inside a field" in end.reason
    again = world.connect(2, session=found.session_id, password=found.passwd)
    assert again.session_id == found.session_id
    (end,) = world.receive(3, b"GET / HTTP/1.1\r\n")
    assert isinstance(end, End)
    assert world.code(2, kazoo.PingInstance) == 0
