"""The contract of metadata stores, asked of the one in memory and of the servers.

Goal: code that is written against the port works on all.  Method: the same scenarios on all, and,
in `test_metadata_histories.py`, random transactions to which all give the same answers.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    MetadataError,
    MetadataVersionError,
    NodeExistsError,
    NodeNotEmptyError,
    NoNodeError,
    TransactionTooLargeError,
)
from dlcore.metadata.port import (
    ANY_VERSION,
    REQUEST_BYTES_MAX,
    Check,
    Create,
    Delete,
    MetadataStore,
    Op,
    Put,
    SessionState,
    Versioned,
)
from tests.fixtures.aio import until
from tests.fixtures.metadata_backend import Backend, play


@pytest.mark.parametrize("value", [b"", b"text", bytes(range(256)), b"x" * 200_000])
def test_a_created_node_has_its_value_at_version_zero(backend: Backend, value: bytes) -> None:
    """Any bytes come back as they were."""

    async def scenario(store: MetadataStore, root: str) -> None:
        await store.create(f"{root}/a", value)
        assert await store.get(f"{root}/a") == Versioned(value, 0)
        assert await store.get(f"{root}/b") is None

    play(backend, scenario)


def test_many_nodes_in_one_answer(backend: Backend) -> None:
    """In the order asked for, None where there is none; fresh if so asked."""

    async def scenario(store: MetadataStore, root: str) -> None:
        assert await store.get_many([]) == []
        paths = [f"{root}/{number}" for number in range(2500)]
        other = await backend.connect()
        for low in range(0, len(paths), 500):
            await other.multi([Create(path, path.encode()) for path in paths[low : low + 500 : 2]])
        await other.put(paths[0], b"", version=0)
        await other.create(f"{root}/owned", b"e", ephemeral=True)
        found = await store.get_many([*paths, f"{root}/owned", paths[0]], fresh=True)
        assert found[0] == found[-1] == Versioned(b"", 1)
        assert found[-2] == Versioned(b"e", 0, other.session_token)
        assert found[1:-2:2] == [None] * 1250
        assert found[2:-2:2] == [Versioned(path.encode(), 0) for path in paths[2::2]]

    play(backend, scenario)


def test_transactions_are_numbered(backend: Backend) -> None:
    """A node says which one created it and which wrote it last; all of one have its number."""

    async def scenario(store: MetadataStore, root: str) -> None:
        await store.multi([Create(f"{root}/a"), Create(f"{root}/a/b"), Create(f"{root}/c")])
        await store.put(f"{root}/c", b"1", version=0)
        with pytest.raises(MetadataVersionError):
            await store.multi([Put(f"{root}/a", b"1", 0), Put(f"{root}/c", b"2", 0)])
        a, b, c = await store.get_many([f"{root}/{name}" for name in ("a", "a/b", "c")])
        assert a is not None
        assert b is not None
        assert c is not None
        assert 0 < a.created == a.changed == b.created == b.changed == c.created < c.changed
        assert (a.children, b.children) == (1, 0)
        single = await store.get(f"{root}/c")
        assert single is not None
        assert (single.created, single.changed) == (c.created, c.changed)
        await store.delete(f"{root}/c")
        await store.create(f"{root}/c")
        again = await store.get(f"{root}/c")
        assert again is not None
        assert again.created == again.changed > c.changed

    play(backend, scenario)


def test_a_request_that_is_too_large_is_not_sent(backend: Backend) -> None:
    """A server closes the connection on it; at the limit it takes what it is sent."""

    async def scenario(store: MetadataStore, root: str) -> None:
        path = f"{root}/a"
        left = REQUEST_BYTES_MAX - len(path) - 64
        for value in (bytes(left + 1), b"x" * 1_100_000):
            for refused in (
                store.create(path, value),
                store.put(path, value, version=ANY_VERSION),
                store.multi([Create(path, value)]),
            ):
                with pytest.raises(TransactionTooLargeError, match=f"from {path} would have"):
                    await refused
        await store.create(path, bytes(left))
        await store.put(path, b"x" * left, version=0)
        many: list[Op] = [Put(path, b"", 1), *(Create(f"{path}/{n:03}") for n in range(9_000))]
        await store.multi(many)
        assert len(await store.get_children(path) or ()) == 9_000

    play(backend, scenario)


def test_create_names_what_is_in_the_way(backend: Backend) -> None:
    """An existing node, a missing parent, and `make_parents` against it."""

    async def scenario(store: MetadataStore, root: str) -> None:
        await store.create(f"{root}/a", b"first")
        with pytest.raises(NodeExistsError, match=f"{root}/a"):
            await store.create(f"{root}/a", b"second")
        with pytest.raises(NoNodeError, match=f"{root}/x/y"):
            await store.create(f"{root}/x/y/z")
        assert await store.get(f"{root}/x") is None
        await store.create(f"{root}/x/y/z", b"deep", make_parents=True)
        assert await store.get(f"{root}/x/y/z") == Versioned(b"deep", 0)
        assert await store.get(f"{root}/x") == Versioned(b"", 0)
        await store.create(f"{root}/x/y/w", make_parents=True)
        with pytest.raises(NodeExistsError):
            await store.create(f"{root}/x/y/z", make_parents=True)
        assert await store.get(f"{root}/a") == Versioned(b"first", 0)

    play(backend, scenario)


def test_children_are_sorted_names_or_none(backend: Backend) -> None:
    """No node and no children are different answers."""

    async def scenario(store: MetadataStore, root: str) -> None:
        for name in ("b", "a%2F", "c", "A"):
            await store.create(f"{root}/{name}")
        await store.create(f"{root}/b/below")
        assert await store.get_children(root) == ["A", "a%2F", "b", "c"]
        assert await store.get_children(f"{root}/a%2F") == []
        assert await store.get_children(f"{root}/none") is None

    play(backend, scenario)


def test_many_lists_of_children(backend: Backend) -> None:
    """In the order asked for, each sorted, None where there is no node."""

    async def scenario(store: MetadataStore, root: str) -> None:
        assert await store.get_children_many([]) == []
        paths = [f"{root}/{number:02}" for number in range(40)]
        await store.multi([Create(path) for path in paths[::2]])
        await store.multi([Create(f"{paths[0]}/{name}") for name in ("b", "a%2F", "A")])
        found = await store.get_children_many([*paths, root])
        assert found[:3] == [["A", "a%2F", "b"], None, []]
        assert found[-1] == [path.rpartition("/")[2] for path in paths[::2]]
        assert len(found) == 41

    play(backend, scenario)


def test_put_compares_and_sets(backend: Backend) -> None:
    """Only the expected version is overwritten."""

    async def scenario(store: MetadataStore, root: str) -> None:
        path = f"{root}/a"
        await store.create(path, b"0")
        assert await store.put(path, b"1", version=0) == 1
        assert await store.put(path, b"2", version=1) == 2
        for wrong in (0, 1, 3):
            with pytest.raises(MetadataVersionError, match=path):
                await store.put(path, b"lost", version=wrong)
        assert await store.get(path) == Versioned(b"2", 2)
        assert await store.put(path, b"3", version=ANY_VERSION) == 3
        with pytest.raises(NoNodeError, match=f"{root}/none"):
            await store.put(f"{root}/none", b"", version=ANY_VERSION)

    play(backend, scenario)


def test_delete_asks_for_the_version_and_no_children(backend: Backend) -> None:
    """A node that comes back starts at version 0 again."""

    async def scenario(store: MetadataStore, root: str) -> None:
        path = f"{root}/a"
        await store.create(path)
        await store.put(path, b"1", version=0)
        await store.create(f"{path}/child")
        with pytest.raises(NodeNotEmptyError, match=path):
            await store.delete(path)
        await store.delete(f"{path}/child")
        with pytest.raises(MetadataVersionError, match=path):
            await store.delete(path, version=0)
        await store.delete(path, version=1)
        with pytest.raises(NoNodeError, match=path):
            await store.delete(path)
        await store.create(path, b"again")
        assert await store.get(path) == Versioned(b"again", 0)

    play(backend, scenario)


def test_multi_applies_all_in_order(backend: Backend) -> None:
    """Later operations see what earlier ones did."""

    async def scenario(store: MetadataStore, root: str) -> None:
        await store.create(f"{root}/old", b"old")
        await store.multi(
            [
                Create(f"{root}/a", b"a"),
                Create(f"{root}/a/b", b"b", ephemeral=True),
                Put(f"{root}/a", b"a1", 0),
                Check(f"{root}/a", 1),
                Delete(f"{root}/old", 0),
                Create(f"{root}/old", b"new"),
            ]
        )
        assert await store.get(f"{root}/a") == Versioned(b"a1", 1)
        assert await store.get(f"{root}/a/b") == Versioned(b"b", 0, store.session_token)
        assert await store.get(f"{root}/old") == Versioned(b"new", 0)
        await store.multi([])

    play(backend, scenario)


@pytest.mark.parametrize("position", [0, 2, 3], ids=["first", "middle", "last"])
@pytest.mark.parametrize(
    ("failing", "error"),
    [
        (Create("{root}/there"), NodeExistsError),
        (Create("{root}/none/below"), NoNodeError),
        (Put("{root}/there", b"", 7), MetadataVersionError),
        (Put("{root}/none", b"", 0), NoNodeError),
        (Delete("{root}/there", 7), MetadataVersionError),
        (Delete("{root}/full"), NodeNotEmptyError),
        (Delete("{root}/none"), NoNodeError),
        (Check("{root}/there", 7), MetadataVersionError),
        (Check("{root}/none", ANY_VERSION), NoNodeError),
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),
)
def test_multi_is_all_or_nothing(
    backend: Backend, failing: Op, error: type[MetadataError], position: int
) -> None:
    """The error is that of the operation to blame, wherever it stands; nothing else happened."""

    async def scenario(store: MetadataStore, root: str) -> None:
        await store.create(f"{root}/there", b"there")
        await store.create(f"{root}/full/child", make_parents=True)
        culprit: Op = replace(failing, path=failing.path.format(root=root))
        ops: list[Op] = [
            Create(f"{root}/new"),
            Put(f"{root}/there", b"changed", 0),
            Delete(f"{root}/full/child"),
        ]
        if isinstance(failing, Delete) and failing.path.endswith("full"):
            ops.pop()
        ops.insert(position, culprit)
        with pytest.raises(error, match=culprit.path):
            await store.multi(ops)
        assert await store.get(f"{root}/new") is None
        assert await store.get(f"{root}/there") == Versioned(b"there", 0)
        assert await store.get_children(f"{root}/full") == ["child"]

    play(backend, scenario)


def test_ephemeral_nodes_vanish_when_their_session_is_closed(backend: Backend) -> None:
    """Others see them while it lives; persistent nodes stay."""

    async def scenario(store: MetadataStore, root: str) -> None:
        other = await backend.connect()
        await other.create(f"{root}/e", b"me", ephemeral=True)
        await other.create(f"{root}/p")
        assert await store.get(f"{root}/e", fresh=True) == Versioned(b"me", 0, other.session_token)
        with pytest.raises(MetadataError):
            await store.create(f"{root}/e/child")
        await other.aclose()
        assert await store.get_children(root, fresh=True) == ["p"]

    play(backend, scenario)


def test_expiry_gives_expired_then_connected_and_a_new_session(expiring_backend: Backend) -> None:
    """The ephemeral nodes are gone, the store goes on by itself."""

    async def scenario(store: MetadataStore, root: str) -> None:
        other = await expiring_backend.connect()
        await other.create(f"{root}/e", ephemeral=True)
        await other.create(f"{root}/p")
        states: list[SessionState] = []
        stop = other.on_session(states.append)
        token = other.session_token
        assert token
        assert token != store.session_token
        await expiring_backend.expire(other)
        await until(lambda: states[-1:] == [SessionState.CONNECTED])
        assert [state for state in states if state is not SessionState.SUSPENDED] == [
            SessionState.EXPIRED,
            SessionState.CONNECTED,
        ]
        assert other.session_state is SessionState.CONNECTED
        assert other.session_token not in {"", token}
        assert (store.figures.sessions_lost, other.figures.sessions_lost) == (0, 1)
        assert await store.get_children(root, fresh=True) == ["p"]
        await other.create(f"{root}/e", b"again", ephemeral=True)
        assert await store.get(f"{root}/e") == Versioned(b"again", 0, other.session_token)
        stop()
        states.clear()
        await expiring_backend.expire(other)
        assert states == []

    play(expiring_backend, scenario)


class Watcher:
    """Counts calls, and says when another one came."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        """Be called."""
        self.calls += 1

    async def settle(self) -> int:
        """Wait until no more calls come, and return how many there were."""
        calls = -1
        while calls != self.calls:
            calls = self.calls
            await asyncio.sleep(0.1)
        return calls


@pytest.mark.parametrize("by_other", [False, True], ids=["own change", "other's change"])
def test_a_watch_is_called_for_every_kind_of_change(backend: Backend, by_other: bool) -> None:
    """Creation, data, child added, child removed, deletion; once soon after subscribing."""

    async def scenario(store: MetadataStore, root: str) -> None:
        path = f"{root}/a"
        writer = await backend.connect() if by_other else store
        watcher = Watcher()
        store.watch(path, watcher)
        assert watcher.calls == 0  # never from within the call
        await until(lambda: watcher.calls >= 1)
        for change in (
            lambda: writer.create(path, b"0"),
            lambda: writer.put(path, b"1", version=0),
            lambda: writer.create(f"{path}/child"),
            lambda: writer.delete(f"{path}/child"),
            lambda: writer.create(f"{path}/child"),
            lambda: writer.delete(f"{path}/child"),
            lambda: writer.delete(path),
            lambda: writer.create(path, b"0"),
            lambda: writer.multi([Put(path, b"1", 0), Create(f"{path}/child")]),
        ):
            before = await watcher.settle()
            await change()
            await until(lambda: watcher.calls > before)  # noqa: B023  # used in this turn only

    play(backend, scenario)


def test_a_watch_does_not_speak_of_other_nodes_or_after_its_end(backend: Backend) -> None:
    """A child's data and a sibling are not the node; two watches of a node are independent."""

    async def scenario(store: MetadataStore, root: str) -> None:
        path = f"{root}/a"
        await store.create(path)
        await store.create(f"{path}/child")
        kept, ended = Watcher(), Watcher()
        store.watch(path, kept)
        stop = store.watch(path, ended)
        await store.get(path, fresh=True)  # behind the watches: they are there, which is reported
        before = await kept.settle()
        await store.put(f"{path}/child", b"1", version=0)
        await store.create(f"{root}/b")
        assert await kept.settle() == before
        stop()
        stop()
        calls = await ended.settle()
        await store.put(path, b"1", version=0)
        await until(lambda: kept.calls > before)
        assert await ended.settle() == calls
        late = Watcher()
        store.watch(path, late)()
        assert await late.settle() == 0

    play(backend, scenario)


def test_a_watcher_that_reads_sees_the_last_change(backend: Backend) -> None:
    """Level-triggered: however calls are merged, reading after each of them ends at the truth."""

    async def scenario(store: MetadataStore, root: str) -> None:
        writer = await backend.connect()
        path = f"{root}/a"
        await store.create(path)
        changed = asyncio.Event()
        store.watch(path, changed.set)
        seen: list[int] = []

        async def follow() -> None:
            while not seen or seen[-1] < 200:
                await changed.wait()
                changed.clear()
                node = await store.get(path)
                assert node is not None
                seen.append(node.version)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow())
            for version in range(200):
                await writer.put(path, b"", version=version)
        assert seen == sorted(seen)

    play(backend, scenario)


def test_a_watch_survives_the_session(expiring_backend: Backend) -> None:
    """It is called after the expiry, and for changes after that."""

    async def scenario(store: MetadataStore, root: str) -> None:
        other = await expiring_backend.connect()
        watcher = Watcher()
        other.watch(f"{root}/a", watcher)
        for _ in range(2):
            before = await watcher.settle()
            await expiring_backend.expire(other)
            await until(lambda: watcher.calls > before)  # noqa: B023  # used in this turn only
        before = await watcher.settle()
        await store.create(f"{root}/a")
        await until(lambda: watcher.calls > before)

    play(expiring_backend, scenario)


def test_fresh_reads_see_completed_writes(backend: Backend) -> None:
    """Also the writes of other sessions."""

    async def scenario(store: MetadataStore, root: str) -> None:
        other = await backend.connect()
        await store.create(f"{root}/a")
        for version in range(50):
            writer, reader = (store, other) if version % 2 else (other, store)
            assert await writer.put(f"{root}/a", b"", version=version) == version + 1
            match version % 4 // 2:
                case 0:
                    assert await reader.get(f"{root}/a", fresh=True) == Versioned(b"", version + 1)
                case _:
                    await reader.sync(f"{root}/a")
                    assert await reader.get(f"{root}/a") == Versioned(b"", version + 1)
        await store.sync(f"{root}/none")
        assert await store.get(f"{root}/none", fresh=True) is None

    play(backend, scenario)


def test_a_session_never_reads_back_in_time(backend: Backend) -> None:
    """Reads without a sync may be old, and are never older than the one before."""

    async def scenario(store: MetadataStore, root: str) -> None:
        reader = await backend.connect()
        await store.create(f"{root}/a")
        seen: list[int] = []

        async def read() -> None:
            while not seen or seen[-1] < 300:
                node = await reader.get(f"{root}/a")
                seen.append(-1 if node is None else node.version)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            for version in range(300):
                await store.put(f"{root}/a", b"", version=version)
        assert seen == sorted(seen)

    play(backend, scenario)


def test_a_session_reads_its_own_writes(backend: Backend) -> None:
    """Also while others write: a read is at least as new as the own write before it."""

    async def scenario(store: MetadataStore, root: str) -> None:
        other = await backend.connect()
        await store.create(f"{root}/a")
        for _ in range(30):
            for writer in (store, other):
                version = await writer.put(f"{root}/a", b"", version=ANY_VERSION)
                node = await writer.get(f"{root}/a")
                assert node is not None
                assert node.version >= version
        await other.create(f"{root}/mine")
        assert await other.get_children(root) == ["a", "mine"]
        await other.delete(f"{root}/mine")
        assert await other.get(f"{root}/mine") is None

    play(backend, scenario)


def test_only_one_of_many_creators_succeeds(backend: Backend) -> None:
    """The exclusion that locks and bindings stand on."""

    async def scenario(store: MetadataStore, root: str) -> None:
        stores = [store, await backend.connect(), await backend.connect()]
        results = await asyncio.gather(
            *(stores[i % 3].create(f"{root}/lock", b"%d" % i) for i in range(30)),
            return_exceptions=True,
        )
        winners = [i for i, result in enumerate(results) if result is None]
        assert len(winners) == 1
        assert sum(isinstance(result, NodeExistsError) for result in results) == 29
        node = await store.get(f"{root}/lock")
        assert node == Versioned(b"%d" % winners[0], 0)

    play(backend, scenario)


def test_a_closed_store_refuses_and_closes_again(backend: Backend) -> None:
    """Every call says that it is closed; `aclose` may come twice and at once."""

    async def scenario(store: MetadataStore, root: str) -> None:
        other = await backend.connect()
        await asyncio.gather(other.aclose(), other.aclose())
        await other.aclose()
        for call in (
            lambda: other.get(root),
            lambda: other.get_children(root),
            lambda: other.create(f"{root}/a"),
            lambda: other.put(root, b"", version=0),
            lambda: other.delete(root),
            lambda: other.multi([Create(f"{root}/a")]),
            lambda: other.sync(root),
        ):
            with pytest.raises(AlreadyClosedError):
                await call()
        with pytest.raises(AlreadyClosedError):
            other.watch(root, lambda: None)
        with pytest.raises(AlreadyClosedError):
            other.on_session(lambda state: None)
        assert await store.get_children(root) == []

    play(backend, scenario)


def test_a_cancelled_request_leaves_the_store_usable(backend: Backend) -> None:
    """Cancellation ends the waiting; later requests get their own answers."""

    async def scenario(store: MetadataStore, root: str) -> None:
        await store.create(f"{root}/a", b"a")
        for _ in range(20):
            task = asyncio.create_task(store.get(root))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await store.get(f"{root}/a") == Versioned(b"a", 0)

    play(backend, scenario)
