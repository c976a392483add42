"""The contract of object stores: in memory, in a folder, and over S3."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import ConfigurationError, ObjectStoreError
from dlcore.log.cold import stores
from dlcore.log.cold.delta_tables import DeltaTables
from dlcore.log.cold.stores import StoredObjects
from tests.fixtures.http_relay import http_relay
from tests.fixtures.memory_objects import MemoryObjects
from tests.fixtures.s3 import S3Server, s3_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.log.cold.objects import Objects


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Run one S3 server for the tests of this file."""
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture(params=["memory", "file", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Objects, str]:
    """Return a store, and a URL below which nothing is yet."""
    if request.param == "memory":
        return MemoryObjects(), "s3://memory/it"
    if request.param == "file":
        return StoredObjects(), f"file://{tmp_path}/new folder".replace(" ", "-")
    server: S3Server = request.getfixturevalue("server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return StoredObjects(), f"{server.url}/{tmp_path.name}"


def test_a_file_is_on_disk_once_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each folder that leads to it: ledgers are deleted because the object is there."""
    synced = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    file = tmp_path / "new" / "a.parquet"
    asyncio.run(StoredObjects().put_new(f"file://{file}", b"0123456789"))
    assert synced == [str(each) for each in (file, *file.parents)]


def test_a_folder_above_that_may_not_be_read_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with the mode 711: what is in it was there before, so none of it is to be synced."""
    synced = []
    open_, sync = os.open, os.fsync

    def guarded(path: Path, *rest: int) -> int:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_(path, *rest)

    def record(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    monkeypatch.setattr(os, "open", guarded)
    monkeypatch.setattr(os, "fsync", record)
    file = tmp_path / "own" / "new" / "a.parquet"
    asyncio.run(StoredObjects().put_new(f"file://{file}", b"0123456789"))
    assert synced == [str(each) for each in (file, file.parent, file.parent.parent)]


def test_an_object_is_written_once_and_read_in_parts(place: tuple[Objects, str]) -> None:
    """A second one of that name is refused, and the first one stays."""
    objects, url = place

    async def body() -> None:
        name = f"{url}/c=1/7-token_x.y-0-1.parquet"
        await objects.put_new(name, memoryview(b"0123456789"))
        with pytest.raises(ObjectStoreError, match="exists"):
            await objects.put_new(name, b"other")
        assert bytes(await objects.read(name, 0, 10)) == b"0123456789"
        assert bytes(await objects.read(name, 3, 5)) == b"34"
        with pytest.raises(ObjectStoreError, match="bytes"):
            await objects.read(name, 8, 12)
        with pytest.raises(ObjectStoreError, match="missing"):
            await objects.read(f"{url}/missing", 0, 1)

    asyncio.run(body())


def test_lists_have_all_below_and_nothing_else(place: tuple[Objects, str]) -> None:
    """With sizes, and times that do not go back; deleted ones are gone, and twice is no error."""
    objects, url = place

    async def found(below: str) -> dict[str, int]:
        return {
            each.url: each.size_bytes async for page in objects.list_below(below) for each in page
        }

    async def body() -> None:
        assert await found(url) == {}
        names = [f"{url}/a/1", f"{url}/a/b/2", f"{url}/ab/3"]
        for size, name in enumerate(names, 1):
            await objects.put_new(name, bytes(size))
        assert await found(url) == {name: size for size, name in enumerate(names, 1)}
        assert await found(f"{url}/a") == {names[0]: 1, names[1]: 2}
        times = [each.modified_ms async for page in objects.list_below(url) for each in page]
        assert max(times) - min(times) < 600_000
        for _ in range(2):
            await objects.delete(names[1])
        assert await found(url) == {names[0]: 1, names[2]: 3}

    asyncio.run(body())


@pytest.mark.parametrize("place", ["file", "s3"], indirect=True)
def test_functions_for_libraries_see_the_same_objects(place: tuple[Objects, str]) -> None:
    """They say None of what is not there, and refuse to write what is."""
    objects, url = place
    name = f"{url}/metadata/1.avro"
    assert (stores.size_of(name), stores.read_whole(name)) == (None, None)
    stores.put_new(name, b"0123456789")
    assert (stores.size_of(name), stores.read_whole(name)) == (10, b"0123456789")
    assert bytes(asyncio.run(objects.read(name, 2, 4))) == b"23"
    with pytest.raises(ObjectStoreError, match=f"writing {re.escape(name)}: AlreadyExistsError"):
        stores.put_new(name, b"other")
    for _ in range(2):
        stores.delete(name)
    assert stores.size_of(name) is None


def test_each_way_to_a_store_has_the_same_limits(tmp_path: Path) -> None:
    """A server that is overloaded is asked again, as often by each library; then the error tells.

    Its answers are counted: the first one, and those to each retry.
    """
    calls: list[Callable[[str], object]] = [
        stores.read_whole,
        stores.size_of,
        stores.delete,
        lambda url: stores.put_new(url, b"x"),
        lambda url: asyncio.run(StoredObjects().read(url, 0, 1)),
        lambda url: asyncio.run(DeltaTables(url, "c/l", StoredObjects()).look()),
    ]
    with s3_server(tmp_path / "s3") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        address = server.environment["AWS_ENDPOINT_URL"].removeprefix("http://")
        with http_relay(address) as relay:
            patch.setenv("AWS_ENDPOINT_URL", f"http://{relay.address}")
            patch.setattr(stores, "RETRIES_MAX", 2)
            patch.setitem(stores.OPTIONS, "max_retries", "2")
            relay.before = lambda *_: "503"
            for number, call in enumerate(calls):
                relay.requests.clear()
                with pytest.raises(ObjectStoreError, match="503") as caught:
                    call(f"{server.url}/away/{number}")
                assert len(relay.requests) == 3
                assert "\x1b" not in str(caught.value)
                assert "\n" not in str(caught.value)


def test_a_client_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another address or key is used at once, and the same ones by the same client."""
    found = []
    for name in ("one", "one", "two"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", name)
        found.append(stores._place("s3://bucket/key")[1])
    assert (found[0] is found[1], found[0] is found[2]) == (True, False)


def test_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the object; no other library's error gets out."""
    monkeypatch.setattr(stores, "RETRIES_MAX", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ObjectStoreError, match=r"reading s3://nowhere/it"):
        asyncio.run(StoredObjects().read("s3://nowhere/it", 0, 1))


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what to install to read a log with cold segments."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'distributed-dlog\[tier\]'"):
        asyncio.run(StoredObjects().read("file:///it", 0, 1))
