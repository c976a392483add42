"""Two releases in one cluster: nothing is lost or doubled, forwards and back.

Method: processes of 0.2.0, out of the repository's history, and of this checkout.  Writers number
their records, tails and readers refuse the first one that is not the next, and at the end each
release reads all that was acknowledged.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore import LogConfig, QuorumConfig
from dlcore.base.features import PARTIAL_REMOVAL, own_release
from dlcore.base.ids import DLSN
from dlcore.ops.cli.app import run
from dlcore.ops.upgrade_report import Role
from dlcore.sync import open_namespace
from tests.fixtures.shell import Shell
from tests.fixtures.waiting import wait_until
from tests.upgrade.cluster import Mixed, Process
from tests.upgrade.releases import LAST, NOW, Installed, install

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
BOOKIES = ("b1", "b2", "b3")
THIS = own_release().version
WAIT_S = 60.0


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The last release."""
    return install(LAST, tmp_path_factory.mktemp("release"))


@pytest.fixture
def cluster(tmp_path: Path, old: Installed) -> Iterator[Mixed]:
    """One without processes yet, on the metadata server of one host, which is of the last one."""
    with Mixed(tmp_path, old) as made:
        yield made


def _make_logs(cluster: Mixed, *names: str) -> None:
    with open_namespace(cluster.uri, config=LogConfig(quorum=QuorumConfig())) as namespace:
        for name in names:
            namespace.create_log(name)


def _start(cluster: Mixed, release: Installed) -> list[Process]:
    return [cluster.bookie(name).start(release) for name in BOOKIES]


def _judge(cluster: Mixed, written: dict[str, Process], old: Installed) -> None:
    """Stop the writers; acknowledged records are there, for readers of both releases."""
    for log, writer in written.items():
        writer.stop()
        counts = {cluster.read(release, log) for release in (old, NOW)}
        assert len(counts) == 1
        assert counts.pop() >= writer.at > 0


def test_bookies_are_upgraded_and_taken_back_while_clients_write(
    cluster: Mixed, old: Installed
) -> None:
    """One after the other, on the same disks; a writer and a tail of each release are at work."""
    bookies = _start(cluster, old)
    assert cluster.releases() == {Role.BOOKIE: {LAST}}
    _make_logs(cluster, "old", "new")
    writers = {
        "old": cluster.client("write-old", "write", "old").start(old),
        "new": cluster.client("write-new", "write", "new").start(NOW),
    }
    tails = [
        cluster.client("tail-old", "tail", "new").start(old),
        cluster.client("tail-new", "tail", "old").start(NOW),
    ]
    for release, version in ((NOW, THIS), (old, LAST)):
        for member in (*bookies, cluster.metadata):
            member.restart(release)
            for client in writers.values():
                client.advance()
        # A writer that begins anew after an error holds no lock meanwhile.
        expected = {Role.BOOKIE: {version}, Role.CLIENT: {LAST, THIS}}
        wait_until(lambda expected=expected: cluster.releases() == expected, timeout_s=WAIT_S)  # type: ignore[misc]
    for tail in tails:
        tail.advance()
    _judge(cluster, writers, old)


def test_no_member_starts_without_a_finalized_feature(cluster: Mixed, old: Installed) -> None:
    """Neither the last release, nor this one, if it is a later one's."""
    cluster.finalize("of a later release")
    bookie, (proxy, _) = cluster.bookie("b1"), cluster.proxy("p1")
    for process in (bookie, proxy):
        for release, version in ((old, LAST), (NOW, THIS)):
            refusal = f"uses of a later release, which dlog {version} does not have"
            assert refusal in process.refused(release)


def test_no_segment_loses_its_front_before_that_is_finalized(
    cluster: Mixed, old: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last release reads the segment as it is; later it is not let in any more."""
    _start(cluster, NOW)
    _make_logs(cluster, "log")
    shell = Shell(cluster.uri, capsys)
    with open_namespace(cluster.uri) as namespace, namespace.open_log("log") as log:
        for number in range(1, 13):
            with namespace.begin_append("job", number) as staged:
                batch = pa.record_batch({"txid": [number], "value": [b"%d" % number]})
                staged.write_batch("log", batch)
                assert staged.commit().committed
        log.mark_end_of_stream()
        log.truncate(DLSN(1, 6, 0))
        assert len(shell.text("ledger", "list", "--quiet").split()) == 12
        assert {cluster.read(release, "log", first=7) for release in (old, NOW)} == {12}
        cluster.finalize(PARTIAL_REMOVAL)
        log.truncate(DLSN(1, 8, 0))
        assert len(shell.text("ledger", "list", "--quiet").split()) == 4
        assert cluster.read(NOW, "log", first=9) == 12
    assert f"uses {PARTIAL_REMOVAL}, which dlog {LAST} does not have" in (
        cluster.bookie("late").refused(old)
    )


@pytest.mark.prove
@pytest.mark.parametrize("order", ["proxies first", "bookies first"])
def test_proxies_of_both_releases_serve_clients_of_both(
    cluster: Mixed, old: Installed, order: str
) -> None:
    """While each proxy is upgraded and taken back, and while the bookies are."""
    bookies = _start(cluster, old)
    proxies, locations = zip(*(cluster.proxy(name) for name in ("p1", "p2")), strict=True)
    for proxy in proxies:
        proxy.start(old)
    endpoint = "grpc://" + ",".join(each.removeprefix("grpc://") for each in locations)
    _make_logs(cluster, "old", "new")
    writers = {
        "old": cluster.client("write-old", "write", "old", endpoint).start(old),
        "new": cluster.client("write-new", "write", "new", endpoint).start(NOW),
    }
    tails = [
        cluster.client("tail-old", "tail", "new", endpoint).start(old),
        cluster.client("tail-new", "tail", "old", endpoint).start(NOW),
    ]

    def roll(members: Sequence[Process], release: Installed) -> None:
        for member in members:
            member.restart(release)
            for client in (*writers.values(), *tails):
                client.advance()

    parts = [proxies, bookies] if order == "proxies first" else [bookies, proxies]
    for release, version in ((NOW, THIS), (old, LAST)):
        for part in parts:
            roll(part, release)
        known = cluster.releases()
        assert (known[Role.BOOKIE], known[Role.PROXY]) == ({version}, {version})
    for location in locations:
        for release in (old, NOW):
            assert cluster.read(release, "old", location) > 0
    _judge(cluster, writers, old)


@pytest.mark.prove
@pytest.mark.parametrize("kinds", ["old among new", "new among old"])
def test_auto_recovery_of_one_release_repairs_bookies_of_the_other(
    cluster: Mixed, old: Installed, kinds: str
) -> None:
    """A disk is lost; its replicas are on another bookie, and a writer goes on meanwhile."""
    repairs, stores = (old, NOW) if kinds == "old among new" else (NOW, old)
    bookies = _start(cluster, stores)
    cluster.bookie("b4").start(old)
    _make_logs(cluster, "log")
    writer = cluster.client("write", "write", "log").start(stores)
    writer.advance()
    cluster.recovery("recovery").start(repairs)
    bookies[0].kill()
    shutil.rmtree(cluster.folder / "b1")
    # It is refused while a ledger needs the bookie.
    decommission = ["--uri", cluster.uri, "bookie", "decommission", "b1", "--yes"]
    wait_until(lambda: run(decommission) == 0, timeout_s=240)
    assert cluster.releases()[Role.AUTORECOVERY] == {THIS if repairs is NOW else LAST}
    writer.advance()
    _judge(cluster, {"log": writer}, old)


@pytest.mark.prove
@pytest.mark.spark
def test_a_query_goes_on_from_the_checkpoint_of_the_other_release(
    cluster: Mixed, old: Installed
) -> None:
    """Forwards and back, with new records each time: each is copied once."""
    _start(cluster, NOW)
    _make_logs(cluster, "source", "copy")
    writer, job = cluster.client("write", "write", "source"), cluster.job("source", "copy")
    copied = [0]
    for release in (old, NOW, old):
        writer.start(NOW).advance()
        writer.stop()
        output = job.start(release).ended()
        assert f"of {release.folder}" in output
        assert job.at == 1, output
        job.stop()
        copied.append(_values(cluster, "copy"))
        assert copied[-1] == _values(cluster, "source") > copied[-2]


def _values(cluster: Mixed, log: str) -> int:
    """Return how many records a log has; each is there once."""
    with open_namespace(cluster.uri) as namespace, namespace.open_log(log) as opened:
        values = sorted(int(value) for value in opened.read().to_pandas()["value"])
    assert values == list(range(1, len(values) + 1))
    return len(values)
