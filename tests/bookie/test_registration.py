"""Cookies and registration, on a metadata store and a disk that fail on demand."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from bookie.disks.port import DiskSpace
from bookie.disks.real import RealDisk
from bookie.membership.identity import begin_life, establish_identity
from bookie.membership.registration_driver import Registrar
from dlcore.base.clock import SystemClock
from dlcore.base.errors import (
    ConfigurationError,
    CorruptMetadataError,
    DLError,
    MetadataConnectionError,
    MetadataError,
    NoNodeError,
)
from dlcore.base.ids import BookieId
from dlcore.ledger.metadata.values import BookieCookie, BookieRegistration
from dlcore.metadata.binding import ensure_namespace
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.stored import decode, encode
from tests.fixtures.aio import run, until_async
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.simulated_store import SimulatedStore, SimulatedTree

if TYPE_CHECKING:
    from pathlib import Path

    from bookie.disks.port import Disk

PATHS = NamespacePaths("/dlog")
CLOCK = SystemClock()
BOOKIE = BookieId("bookie-1", "1" * 32)
ADDRESS = "127.0.0.1:5000"


async def connect() -> tuple[SimulatedTree, SimulatedStore, str]:
    """Return a tree with a namespace, a session, and the cluster id."""
    tree = SimulatedTree()
    store = tree.connect()
    return tree, store, (await ensure_namespace(store, PATHS, CLOCK)).cluster_id


async def make_cookie(store: SimulatedStore) -> str:
    """Give `BOOKIE` its cookie in the cluster; return its path."""
    cookie = BookieCookie(
        name=BOOKIE.name, incarnation=BOOKIE.incarnation, cluster_id="c", created_ms=0
    )
    await store.create(PATHS.cookie(BOOKIE.name), encode(cookie))
    return PATHS.cookie(BOOKIE.name)


async def boot(disk: Disk, store: SimulatedStore, cluster_id: str, name: str) -> BookieCookie:
    """Do what a start does with the identity; the storage's first file stands for data."""
    cookie = await establish_identity(
        disk, store, PATHS, name=name, cluster_id=cluster_id, clock=CLOCK
    )
    if "0000000001.log" not in disk.names():
        await disk.write_file("0000000001.log", b"data")
    await begin_life(disk, store, PATHS, cookie, clock=CLOCK)
    return replace(cookie, life=0, start="")  # the same bookie, however often it was started


def test_an_identity_is_made_once_and_kept() -> None:
    """Boot twice: same incarnation, in the folder and in the cluster; another bookie differs."""

    async def scenario() -> None:
        _, store, cluster_id = await connect()
        disk = MemoryDisk()
        first = await boot(disk, store, cluster_id, "bookie-1")
        assert await boot(disk, store, cluster_id, "bookie-1") == first
        assert disk.names() == ["0000000001.log", "cookie"]
        assert (first.name, first.cluster_id) == ("bookie-1", cluster_id)
        other = await boot(MemoryDisk(), store, cluster_id, "bookie-2")
        assert other.incarnation != first.incarnation
        await store.aclose()

    run(scenario())


def test_folders_that_are_not_this_bookies_are_refused() -> None:
    """Wiped, swapped, of another cluster, without cookie, emptied of data: each named."""

    async def scenario() -> None:
        _, store, cluster_id = await connect()
        disk_1, disk_2 = MemoryDisk(), MemoryDisk()
        await boot(disk_1, store, cluster_id, "bookie-1")
        await boot(disk_2, store, cluster_id, "bookie-2")
        stray, emptied = MemoryDisk(), MemoryDisk()
        await stray.write_file("holiday.jpg", b"")
        cookie = await disk_1.read_file("cookie")
        assert cookie is not None
        await emptied.write_file("cookie", cookie)
        await emptied.write_file("newest", b"1")
        await emptied.write_file("holiday.jpg", b"")
        for disk, name, cluster, said in (
            (MemoryDisk(), "bookie-1", cluster_id, "folder is empty, but the cluster knows"),
            (disk_2, "bookie-1", cluster_id, "belongs to bookie 'bookie-2', not to 'bookie-1'"),
            (disk_1, "bookie-1", "other", "belongs to cluster"),
            (stray, "bookie-3", cluster_id, "no cookie but other files"),
            (emptied, "bookie-1", cluster_id, "files were deleted"),
        ):
            before = disk.names()
            with pytest.raises(ConfigurationError, match=said):
                await boot(disk, store, cluster, name)
            assert disk.names() == before
        assert await store.get(PATHS.cookie("bookie-3")) is None
        await store.aclose()

    run(scenario())


def test_folders_inside_the_folder_do_not_matter(tmp_path: Path) -> None:
    """A fresh mount has a folder of its own: it is empty, and no data when the data is gone."""

    async def scenario() -> None:
        _, store, cluster_id = await connect()
        (tmp_path / "lost+found").mkdir()
        disk = RealDisk(tmp_path)
        await boot(disk, store, cluster_id, "bookie-1")
        await disk.delete(["0000000001.log"])
        with pytest.raises(ConfigurationError, match="files were deleted"):
            await boot(disk, store, cluster_id, "bookie-1")
        await disk.aclose()
        await store.aclose()

    run(scenario())


def test_a_cluster_that_lost_or_changed_the_cookie_is_noticed() -> None:
    """Delete the cluster's cookie; then let another folder take the name."""

    async def scenario() -> None:
        _, store, cluster_id = await connect()
        disk = MemoryDisk()
        await boot(disk, store, cluster_id, "bookie-1")
        await store.delete(PATHS.cookie("bookie-1"))
        with pytest.raises(
            ConfigurationError, match="has no cookie /dlog/bookies/cookies/bookie-1"
        ):
            await boot(disk, store, cluster_id, "bookie-1")
        await boot(MemoryDisk(), store, cluster_id, "bookie-1")
        with pytest.raises(ConfigurationError, match="another folder holds"):
            await boot(disk, store, cluster_id, "bookie-1")
        await store.aclose()

    run(scenario())


@pytest.mark.parametrize("applied", [True, False])
def test_an_interrupted_first_start_is_finished_by_the_next(applied: bool) -> None:
    """Lose the reply of the cookie's creation, and crash before the folder's cookie is final."""

    async def scenario() -> None:
        _, store, cluster_id = await connect()
        disk = MemoryDisk()
        store.lose_next_reply(applied=applied)
        arguments: dict[str, Any] = {"name": "bookie-1", "cluster_id": cluster_id, "clock": CLOCK}
        if applied:
            await establish_identity(disk, store, PATHS, **arguments)
        else:
            with pytest.raises(MetadataConnectionError):
                await establish_identity(disk, store, PATHS, **arguments)
        assert disk.names() == ["cookie.new"]
        cookie = await boot(disk, store, cluster_id, "bookie-1")
        assert await boot(disk, store, cluster_id, "bookie-1") == cookie
        await store.aclose()

    run(scenario())


def test_a_crash_at_any_step_of_the_first_start_heals() -> None:
    """Lose power at each step of the disk in turn; the next start gets through, or says why not."""

    async def scenario() -> None:
        for step in range(1, 30):
            _, store, cluster_id = await connect()
            disk = MemoryDisk()
            disk.device.crash_at_step = step
            try:
                await boot(disk, store, cluster_id, "bookie-1")
            except DLError:
                disk.crash()
                await boot(disk, store, cluster_id, "bookie-1")
            else:
                assert step > 3
            await store.aclose()

    run(scenario())


def test_a_damaged_cookie_is_refused() -> None:
    """Flip the cookie's bytes."""

    async def scenario() -> None:
        _, store, cluster_id = await connect()
        disk = MemoryDisk()
        await boot(disk, store, cluster_id, "bookie-1")
        await disk.write_file("cookie", b"\xff\xff")
        with pytest.raises(CorruptMetadataError, match="file cookie"):
            await boot(disk, store, cluster_id, "bookie-1")
        await store.aclose()

    run(scenario())


class Registered:
    """A registrar at work, and what a test asks about it."""

    def __init__(self, tree: SimulatedTree, *, address: str = ADDRESS) -> None:
        self.store = tree.connect()
        self.conflicts: list[DLError] = []
        self.registrar = Registrar(
            self.store,
            PATHS,
            bookie=BOOKIE,
            address=address,
            control_address="127.0.0.1:2",
            on_conflict=self.conflicts.append,
        )

    async def where(self) -> tuple[str, str]:
        """Return the address registered as writable, and as read-only; empty if none."""
        found = []
        for path in (PATHS.bookie_available(BOOKIE.name), PATHS.bookie_readonly(BOOKIE.name)):
            node = await self.store.get(path)
            found.append(
                ""
                if node is None
                else decode(BookieRegistration, node.value, source="/here").address
            )
            assert node is None or node.session == self.store.session_token
        return found[0], found[1]

    async def until_at(self, available: str, readonly: str) -> None:
        """Wait for both answers."""

        async def is_there() -> bool:
            try:
                return await self.where() == (available, readonly)
            except MetadataError:
                return False

        await until_async(is_there)


def test_a_registration_moves_with_the_state_and_goes_with_the_bookie() -> None:
    """Writable, read-only, writable, gone."""

    async def scenario() -> None:
        tree, store, _ = await connect()
        await make_cookie(store)
        one = Registered(tree)
        await one.registrar.register(is_read_only=False, patience_s=0)
        assert await one.where() == (ADDRESS, "")
        one.registrar.set_read_only(is_read_only=True)
        await one.until_at("", ADDRESS)
        one.registrar.set_read_only(is_read_only=False)
        await one.until_at(ADDRESS, "")
        await one.registrar.aclose()
        assert await one.where() == ("", "")
        await one.registrar.aclose()
        await one.store.aclose()
        await store.aclose()

    run(scenario())


def test_a_bookie_without_a_cookie_is_not_registered() -> None:
    """It was decommissioned before it registered, or while its session was lost.

    A store that has no cookie at all says nothing about this bookie.
    """

    async def scenario() -> None:
        tree, store, _ = await connect()
        one = Registered(tree)
        with pytest.raises(NoNodeError):
            await one.registrar.register(is_read_only=False, patience_s=0)
        await store.create(PATHS.cookie("another"), b"its cookie")
        with pytest.raises(ConfigurationError, match=r"has no cookie .*decommissioned"):
            await one.registrar.register(is_read_only=False, patience_s=0)
        cookie = await make_cookie(store)
        await one.registrar.register(is_read_only=False, patience_s=0)
        await store.delete(cookie)
        one.store.expire()

        async def has_stopped() -> bool:
            return bool(one.conflicts)

        await until_async(has_stopped)
        assert "decommissioned" in str(one.conflicts[0])
        assert await one.where() == ("", "")
        await one.registrar.aclose()
        await one.store.aclose()
        await store.aclose()

    run(scenario())


def test_a_registration_survives_its_session() -> None:
    """Expire the session, seen at once and seen late; lose a reply; delete the node by hand."""

    async def scenario() -> None:
        tree, store, _ = await connect()
        await make_cookie(store)
        one = Registered(tree)
        await one.registrar.register(is_read_only=False, patience_s=0)
        one.store.expire()
        await one.until_at(ADDRESS, "")
        one.store.disconnect()
        one.store.expire()
        one.store.reconnect()
        await one.until_at(ADDRESS, "")
        one.store.lose_next_reply(applied=False)
        one.store.expire()
        await one.until_at(ADDRESS, "")
        await store.delete(PATHS.bookie_available(BOOKIE.name))
        await one.until_at(ADDRESS, "")
        await one.registrar.aclose()
        await one.store.aclose()
        await store.aclose()

    run(scenario())


def test_the_node_of_the_session_before_is_replaced_and_outlives_it() -> None:
    """A process that was killed left its node; the new one's node stays when that session ends."""

    async def scenario() -> None:
        tree, store, _ = await connect()
        await make_cookie(store)
        killed = Registered(tree, address="127.0.0.1:4000")
        await killed.registrar.register(is_read_only=True, patience_s=0)
        one = Registered(tree)
        await one.registrar.register(is_read_only=False, patience_s=0)
        assert await one.where() == (ADDRESS, "")
        # The killed process cannot do this; a copy of its folder that still runs gives way.
        await until_async(lambda: _returning(bool(killed.conflicts)))
        killed.store.expire()
        await one.until_at(ADDRESS, "")
        assert not one.conflicts
        for each in (killed, one):
            await each.registrar.aclose()
            await each.store.aclose()
        await store.aclose()

    run(scenario())


def test_a_restart_on_the_same_port_does_not_lean_on_the_old_session() -> None:
    """The node left behind says the very same; it must still be made anew, or it dies later."""

    async def scenario() -> None:
        tree, store, _ = await connect()
        await make_cookie(store)
        killed, one = Registered(tree), Registered(tree)
        await killed.registrar.register(is_read_only=False, patience_s=0)
        await one.registrar.register(is_read_only=False, patience_s=0)
        killed.store.expire()
        assert await one.where() == (ADDRESS, "")
        for each in (killed, one):
            await each.registrar.aclose()
            await each.store.aclose()
        await store.aclose()

    run(scenario())


def test_a_change_of_space_never_unregisters() -> None:
    """The node is set in its place: it keeps its session, and no client sees the bookie gone."""

    async def scenario() -> None:
        tree, store, _ = await connect()
        await make_cookie(store)
        one = Registered(tree)
        one.registrar.set_space(DiskSpace(free_bytes=70, total_bytes=100))
        await one.registrar.register(is_read_only=False, patience_s=0)
        path = PATHS.bookie_available(BOOKIE.name)
        first = await store.get(path)
        assert first is not None

        async def is_set(free_bytes: int) -> bool:
            node = await store.get(path)
            assert node is not None
            return decode(BookieRegistration, node.value, source="/here").free_bytes == free_bytes

        for free_bytes in (60, 50):
            one.registrar.set_space(DiskSpace(free_bytes=free_bytes, total_bytes=100))
            await until_async(lambda free_bytes=free_bytes: is_set(free_bytes))  # type: ignore[misc]
        last = await store.get(path)
        assert last is not None
        assert last.version == first.version + 2  # a new node would start at 0
        assert last.session == one.store.session_token
        before, after = (
            decode(BookieRegistration, first.value, source="/here"),
            decode(BookieRegistration, last.value, source="/here"),
        )
        assert before.session == after.session == one.store.session_token
        assert (before.free_bytes, before.total_bytes) == (70, 100)
        one.store.expire()
        await one.until_at(ADDRESS, "")
        anew = await store.get(path)
        assert anew is not None
        assert decode(BookieRegistration, anew.value, source="/here").session not in (
            "",
            before.session,
        )
        assert decode(BookieRegistration, anew.value, source="/here").free_bytes == 50
        await one.registrar.aclose()
        await one.store.aclose()
        await store.aclose()

    run(scenario())


def test_a_lost_reply_to_a_change_of_space_is_harmless() -> None:
    """Whether it arrived or not: it is looked at again."""

    async def scenario() -> None:
        tree, store, _ = await connect()
        await make_cookie(store)
        one = Registered(tree)
        await one.registrar.register(is_read_only=False, patience_s=0)

        async def is_set(free_bytes: int) -> bool:
            node = await store.get(PATHS.bookie_available(BOOKIE.name))
            return (
                node is not None
                and decode(BookieRegistration, node.value, source="/here").free_bytes == free_bytes
            )

        for free_bytes, applied in ((60, True), (50, False)):
            one.store.lose_next_reply(applied=applied)
            one.registrar.set_space(DiskSpace(free_bytes=free_bytes, total_bytes=100))
            await until_async(lambda free_bytes=free_bytes: is_set(free_bytes))  # type: ignore[misc]
        assert not one.conflicts
        await one.registrar.aclose()
        await one.store.aclose()
        await store.aclose()

    run(scenario())


async def _returning(value: bool) -> bool:
    return value


def test_another_incarnation_under_the_name_is_waited_out_or_refused() -> None:
    """A node of another incarnation: it vanishes with its session, or the start is refused."""

    async def scenario() -> None:
        tree, store, _ = await connect()
        await make_cookie(store)
        other = tree.connect()
        value = encode(
            BookieRegistration(name=BOOKIE.name, incarnation="9" * 32, address="127.0.0.1:1")
        )
        await other.create(PATHS.bookie_available(BOOKIE.name), value, ephemeral=True)
        one = Registered(tree)
        with pytest.raises(ConfigurationError, match="stop one of the two"):
            await one.registrar.register(is_read_only=False, patience_s=0)
        registering = asyncio.create_task(one.registrar.register(is_read_only=False, patience_s=60))
        await asyncio.wait([registering], timeout=0.05)
        assert not registering.done()
        await other.aclose()
        await registering
        assert await one.where() == (ADDRESS, "")
        await one.registrar.aclose()
        await one.store.aclose()
        await store.aclose()

    run(scenario())


def test_a_defect_of_the_registrar_ends_the_bookie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its registration would end, and no one would notice."""

    async def scenario() -> None:
        tree, store, _ = await connect()
        await make_cookie(store)
        one = Registered(tree)
        await one.registrar.register(is_read_only=False, patience_s=0)

        async def planted(*_: object) -> None:
            raise ZeroDivisionError("planted")

        monkeypatch.setattr(Registrar, "_answer_of", planted)
        one.registrar.set_read_only(is_read_only=True)

        async def has_stopped() -> bool:
            return bool(one.conflicts)

        await until_async(has_stopped)
        assert "ZeroDivisionError('planted')" in str(one.conflicts[0])
        await one.registrar.aclose()
        await one.store.aclose()
        await store.aclose()

    run(scenario())
