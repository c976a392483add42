"""Folders swapped, cookies damaged: no bookie serves under a wrong identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bookie.disks.real import RealDisk
from bookie.membership.identity import COOKIE_FILE
from dlcore import LogConfig, LogRecord, QuorumConfig
from dlcore.base.errors import BookieUnavailableError, DLError
from dlcore.sync import open_namespace
from tests.bookie.test_registration import boot, connect
from tests.fixtures.aio import run
from tests.fixtures.lengths import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Bookie, Sandbox

RECORDS = 200


def damaged(cookie: bytes) -> Iterator[bytes | None]:
    """Return a cookie with each of its bits flipped, cut at each byte, filled with zeros, gone."""
    for place in sample(range(8 * len(cookie)), 100):
        offset, bit = divmod(place, 8)
        yield cookie[:offset] + bytes([cookie[offset] ^ 1 << bit]) + cookie[offset + 1 :]
    for end in sample(range(len(cookie)), 30):
        yield cookie[:end]
    yield bytes(len(cookie))
    yield None


def test_every_bit_of_a_cookie(tmp_path: Path) -> None:
    """Goal: a cookie that changed is refused, in the folder and in the cluster alike."""

    async def main() -> None:
        _, store, cluster_id = await connect()
        disk = RealDisk(tmp_path)
        await boot(disk, store, cluster_id, "bookie-1")
        cookie = await disk.read_file(COOKIE_FILE)
        assert cookie is not None
        for changed in damaged(cookie):
            await disk.delete([COOKIE_FILE])
            if changed is not None:
                await disk.write_file(COOKIE_FILE, changed)
            with pytest.raises(DLError):
                await boot(disk, store, cluster_id, "bookie-1")
        await disk.write_file(COOKIE_FILE, cookie)
        await boot(disk, store, cluster_id, "bookie-1")
        await disk.aclose()
        await store.aclose()

    run(main())


def expect_refusal(bookie: Bookie, *messages: str) -> None:
    """See that the bookie does not start, and says why."""
    with pytest.raises(BookieUnavailableError) as refused:
        bookie.restart()
    for message in messages:
        assert message in str(refused.value)


def swap(a: Path, b: Path) -> None:
    """Swap two files or folders."""
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


@pytest.mark.integration
@pytest.mark.prove
def test_folders_of_two_bookies_swapped(fresh_sandbox: Callable[..., Sandbox]) -> None:
    """Goal: neither the whole folders nor single files can be swapped; put back, all is there."""
    cluster = fresh_sandbox(2)
    one, two = cluster.bookies
    config = LogConfig(quorum=QuorumConfig.of_replication_factor(2))
    with open_namespace(cluster.uri, config=config) as namespace:
        namespace.create_log("swapped")
        with namespace.open_log("swapped").open_writer() as writer:
            for txid in range(RECORDS):
                writer.write(LogRecord(txid, b"%d" % txid))
    for bookie in (one, two):
        bookie.kill()
    swap(one.folder, two.folder)
    expect_refusal(one, "the data folder belongs to bookie 'bookie-2', not to 'bookie-1'")
    expect_refusal(two, "the data folder belongs to bookie 'bookie-1', not to 'bookie-2'")
    swap(one.folder, two.folder)
    (log,) = (path.name for path in one.folder.glob("*.log"))
    swap(one.folder / log, two.folder / log)
    for bookie in (one, two):
        expect_refusal(bookie, log, "written by another bookie")
    swap(one.folder / log, two.folder / log)
    swap(one.folder / COOKIE_FILE, two.folder / COOKIE_FILE)
    for bookie in (one, two):
        expect_refusal(bookie, "the data folder belongs to bookie", bookie.name)
    swap(one.folder / COOKIE_FILE, two.folder / COOKIE_FILE)
    cookie = (one.folder / COOKIE_FILE).read_bytes()
    (one.folder / COOKIE_FILE).write_bytes(b"")
    expect_refusal(one, f"file {COOKIE_FILE} of the data folder")
    (one.folder / COOKIE_FILE).unlink()
    expect_refusal(one, "the data folder holds no cookie but other files")
    (one.folder / COOKIE_FILE).write_bytes(cookie)
    for bookie in (one, two):
        bookie.restart()
        other = two if bookie is one else one
        other.kill()
        with (
            open_namespace(cluster.uri) as namespace,
            namespace.open_log("swapped").open_reader() as reader,
        ):
            assert [r.payload for r in reader.read_bulk(RECORDS)] == [
                b"%d" % i for i in range(RECORDS)
            ]
        other.restart()
