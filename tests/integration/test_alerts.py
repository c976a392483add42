"""Each alert rule: a fault on real processes makes it fire, and it was silent before.

Meanwhile the commands of its page of the runbook are run; afterwards it is silent again.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dlcore.base.clock import SystemClock
from dlcore.base.config import LogConfig, LogSettings, QuorumConfig
from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace
from dlspark import ProgressListener
from dlspark.lag import Lag, LagReport
from tests.fixtures import watched as watching
from tests.fixtures.alerts import PROMTOOL, RULES, firing, look, samples_of
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.operators import asked, scraped
from tests.fixtures.ports import free_ports
from tests.fixtures.proxies import proxy_process
from tests.fixtures.runbook import Operator, commands_of
from tests.fixtures.waiting import wait_until
from tests.fixtures.watched import WAIT_S, other_port, require_fires, watched_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ops.sandbox.cluster import Bookie
    from tests.fixtures.alerts import Seen
    from tests.fixtures.shell import Shell
    from tests.fixtures.watched import Watched

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(PROMTOOL is None, reason="Debian's package prometheus has promtool"),
]

MIB = 2**20
COPIES = "3"
shell, operator = watching.shell, watching.operator
"""Fixtures over the `watched` of this module."""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A cluster that the tests share; each undoes its fault."""
    with watched_cluster(tmp_path_factory.mktemp("alerts")) as cluster:
        yield cluster


def test_the_rules_are_valid() -> None:
    """Promtool accepts them, and the configuration that names them."""
    assert PROMTOOL is not None
    subprocess.run([PROMTOOL, "check", "rules", str(RULES)], check=True, capture_output=True)
    config = RULES.parent / "prometheus.yml"
    subprocess.run([PROMTOOL, "check", "config", str(config)], check=True, capture_output=True)


def test_a_bookie_that_dies(watched: Watched, tmp_path: Path, operator: Operator) -> None:
    """With three bookies for three copies no bookie can take over its place."""
    watched.write("lost")
    before, bookie = watched.look(), watched.sandbox.bookies[2]
    bookie.kill()
    listed = "dlog_autorecovery_underreplicated_ledgers"
    try:
        wait_until(lambda: watched.value("autorecovery", listed), timeout_s=WAIT_S)
        during = watched.look()
        seen = operator.look("DlogProcessDown", "DlogUnderReplicated")
        assert f"{bookie.name} " not in seen.partition("underreplicated")[0]
        operator.look("DlogRecoveryStuck")
        operator.act("DlogRecoveryStuck")
    finally:
        bookie.restart()
    wait_until(lambda: not watched.value("autorecovery", listed), timeout_s=WAIT_S)
    alerts = ["DlogProcessDown", "DlogUnderReplicated", "DlogRecoveryStuck"]
    require_fires(alerts, tmp_path, before, during, watched.look)


def test_a_drained_proxy(
    watched: Watched, tmp_path: Path, shell: Shell, operator: Operator
) -> None:
    """It lives, and takes no logs."""
    before = watched.look()
    endpoint = ("--endpoint", watched.sandbox.proxies[0].location)
    shell.text(*endpoint, "proxy", "drain")
    during = watched.look()
    assert "was drained" in operator.look("DlogNotReady")
    operator.act("DlogNotReady")
    require_fires(["DlogNotReady"], tmp_path, before, during, watched.look)


def test_no_auditor(watched: Watched, tmp_path: Path, shell: Shell, operator: Operator) -> None:
    """As in a forgotten pause."""
    before, is_auditor = watched.look(), "dlog_autorecovery_is_auditor"
    shell.text("autorecovery", "pause")
    wait_until(lambda: not watched.value("autorecovery", is_auditor), timeout_s=WAIT_S)
    during = watched.look()
    assert "paused" in operator.look("DlogNoAuditor")
    operator.act("DlogNoAuditor")
    wait_until(lambda: watched.value("autorecovery", is_auditor), timeout_s=WAIT_S)
    require_fires(["DlogNoAuditor"], tmp_path, before, during, watched.look)


def test_logs_that_move_again_and_again(
    watched: Watched, tmp_path: Path, shell: Shell, operator: Operator
) -> None:
    """An operator releases them, and the clients make the proxy acquire them."""
    endpoint = ("--endpoint", watched.sandbox.proxies[0].location)
    before = watched.look()
    owned = int(watched.value("proxy-1", "dlog_proxy_owned_logs")) + 1
    with open_namespace(watched.sandbox.proxies[0].location) as namespace:
        # In half an hour: the alert wants three for each owned log in ten minutes.
        for number in range(10 * owned):
            with namespace.open_log("moving", create_if_missing=True).open_writer() as writer:
                writer.write(LogRecord(number, b"x"))
            shell.text(*endpoint, "proxy", "release", "moving")
    during = watched.look()
    operator.look("DlogOwnerMoves")
    require_fires(["DlogOwnerMoves"], tmp_path, before, during, watched.look)


def test_slow_appends(watched: Watched, tmp_path: Path, shell: Shell, operator: Operator) -> None:
    """Two of three bookies stand still for a second, so no ack quorum answers."""
    with (
        open_namespace(watched.sandbox.proxies[0].location) as namespace,
        namespace.open_log("slow", create_if_missing=True).open_writer() as writer,
    ):
        writer.write(LogRecord(0, b"x"))
        writer.flush()
        before = watched.look()
        resume = threading.Timer(2.0, _resume, watched.sandbox.bookies[:2])
        _pause(*watched.sandbox.bookies[:2])
        resume.start()
        writer.write(LogRecord(0, b"x"))
        writer.flush()
        resume.join()
        during = watched.look()
    assert "dlog_client_append_seconds" in operator.look("DlogAppendSlow")
    operator.act("DlogAppendSlow")
    shell.text("bookie", "read-only", "bookie-1", "--off")
    require_fires(["DlogAppendSlow"], tmp_path, before, during, watched.look)


def test_slow_syncs(watched: Watched, tmp_path: Path, shell: Shell, operator: Operator) -> None:
    """A bookie stands still while it writes, again until a write was hit."""
    bookie = watched.sandbox.bookies[0]
    before, during = watched.look(), watched.look()

    def is_hit() -> bool:
        nonlocal before, during
        before = watched.look()
        writing = threading.Thread(target=watched.write, args=("synced", 60, 500_000))
        writing.start()
        while writing.is_alive():
            _pause(bookie)
            time.sleep(0.3)
            _resume(bookie)
            writing.join(0.05)
        during = watched.look()
        return firing("DlogSyncSlow", tmp_path, before, during) == (False, True)

    wait_until(is_hit, timeout_s=WAIT_S)
    assert "dlog_bookie_sync_seconds" in operator.look("DlogSyncSlow")
    operator.act("DlogSyncSlow")
    assert "read-only" in shell.text("bookie", "list")
    shell.text("bookie", "read-only", "bookie-1", "--off")
    require_fires(["DlogSyncSlow"], tmp_path, before, during, watched.look)


def test_damage(watched: Watched, tmp_path: Path, operator: Operator) -> None:
    """A byte of an entry differs on the disk; scrubbing finds it, and it is fetched again."""
    watched.write("damaged", 100)
    before, bookie = watched.look(), watched.sandbox.bookies[1]
    path = max(bookie.folder.glob("*.log"), key=lambda each: each.stat().st_mtime_ns)
    at = path.read_bytes().index(b"x" * 1000) + 500
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"!")
    wait_until(
        lambda: (
            watched.value(bookie.name, "dlog_bookie_damaged_entries")
            or watched.value(bookie.name, "dlog_bookie_repaired_entries_total")
        ),
        timeout_s=WAIT_S,
    )
    during = watched.look()
    operator.look("DlogDamageFound")
    operator.act("DlogDamageFound")
    damaged = "dlog_bookie_damaged_entries"
    wait_until(lambda: not watched.value(bookie.name, damaged), timeout_s=WAIT_S)
    require_fires(["DlogDamageFound"], tmp_path, before, during, watched.look)


def test_a_cold_object_is_lost(watched: Watched, tmp_path: Path, operator: Operator) -> None:
    """A process moves it away; scrubbing finds it, and finds it again when it is back."""
    tier, holes = tmp_path / "tier", "dlog_autorecovery_cold_holes"
    before = watched.look()
    with open_namespace(watched.sandbox.uri) as namespace:
        settings = LogSettings(tier=f"file://{tier}", tier_after_s=0, segment_bytes_max=10_000)
        namespace.create_log("cold", settings=settings)
        with namespace.open_log("cold").open_writer() as writer:
            for _ in range(30):
                writer.write(LogRecord(0, b"x" * 1000))
                writer.flush()
        segments = namespace.open_log("cold").get_log_segments
        wait_until(lambda: any(e.is_cold for s in segments() for e in s.extents), timeout_s=WAIT_S)
    kept = tmp_path / "kept"
    kept.mkdir()

    def is_seen() -> bool:
        for each in tier.glob("*/*/1/*.parquet"):  # also one that was made again of old ledgers
            each.rename(kept / each.name)
        return bool(watched.value("autorecovery", holes))

    wait_until(is_seen, timeout_s=WAIT_S)
    during = watched.look()
    operator = operator.knowing(LOG="cold")
    # The status has the ledger at once, and the reason after the first try to mend it.
    wait_until(lambda: "are lost with object" in operator.look("DlogColdDamage"), timeout_s=WAIT_S)
    (folder,) = tier.glob("*/*/1")
    for each in kept.iterdir():
        each.rename(folder / each.name)
    operator.act("DlogColdDamage")
    wait_until(lambda: not watched.value("autorecovery", holes), timeout_s=WAIT_S)
    require_fires(["DlogColdDamage"], tmp_path, before, during, watched.look)


def test_an_export_that_fails(watched: Watched, tmp_path: Path, shell: Shell) -> None:
    """A file is where its folder should be; once it is gone, there is an export."""
    age = "dlog_autorecovery_export_age_seconds"
    every_s, place = 0.5, tmp_path / "exports"
    before = watched.look()
    place.write_bytes(b"")
    keys = {"export": f"file://{place}/here", "export_every_s": every_s}
    words = [word for key in keys for word in ("--set", f"autorecovery.{key}={keys[key]}")]
    shell.text("cluster", "settings", *words)

    def is_old() -> bool:
        return any(
            name.startswith(age) and value > 4 * every_s for name, value in watched.look().items()
        )

    try:
        wait_until(is_old, timeout_s=WAIT_S)
        during = watched.look()
        # The process took another port with its new settings.
        operator = Operator(shell, {"autorecovery": watched.url("autorecovery")}, {})
        failed = "export of the metadata to file:"
        wait_until(lambda: failed in operator.look("DlogExportOld"), timeout_s=WAIT_S)
        place.unlink()
        operator.act("DlogExportOld")
        wait_until(lambda: shell.json("autorecovery", "status")["exported"], timeout_s=WAIT_S)
        # The next one must not become due while the machine is busy.
        shell.text("cluster", "settings", "--set", "autorecovery.export_every_s=3600")
        require_fires(["DlogExportOld"], tmp_path, before, during, watched.look)
    finally:
        names = [word for key in keys for word in ("--unset", f"autorecovery.{key}")]
        with other_port(watched):
            shell.text("cluster", "settings", *names)


def test_the_metadata_store_stands_still(
    watched: Watched, tmp_path: Path, operator: Operator
) -> None:
    """Each process tells that it does not answer."""
    before = watched.look()
    watched.sandbox.metadata_server.pause()
    connected = "dlog_metadata_connected"
    try:
        wait_until(lambda: not watched.value("bookie-1", connected), timeout_s=WAIT_S)
        during = watched.look()
        assert "the session is suspended" in operator.look("DlogMetadataSessionLost")
    finally:
        watched.sandbox.metadata_server.resume()
    wait_until(lambda: watched.value("bookie-1", connected), timeout_s=WAIT_S)
    wait_until(lambda: watched.value("proxy-1", "dlog_ready"), timeout_s=WAIT_S)
    wait_until(lambda: watched.value("autorecovery", connected), timeout_s=WAIT_S)
    require_fires(["DlogMetadataSessionLost"], tmp_path, before, during, watched.look)


def test_a_kind_of_process_that_does_not_run(
    watched: Watched, tmp_path: Path, operator: Operator
) -> None:
    """No sample of it is there."""
    before = watched.look()
    during = {series: value for series, value in before.items() if "autorecovery" not in series}
    assert "dlog_build_info" in operator.look("DlogMetricsAbsent")
    require_fires(["DlogMetricsAbsent"], tmp_path, before, during, watched.look)


def test_a_certificate_that_ends(
    watched: Watched,
    tmp_path: Path,
    shell: Shell,
    operator: Operator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is valid for 5 days more; the page makes another one, which the process reads."""
    monkeypatch.chdir(tmp_path)
    init = next(line for line in commands_of("DlogCertificateEnds", "Do") if "secure init" in line)
    shell.text(*shlex.split(init)[1:], "--days", "5")
    folder = tmp_path / "cluster" / "hosts" / "node-1"
    files = {"ca": "ca.pem", "cert": "bookie.pem", "key": "bookie.key"}
    options = [f"--tls-{key}={folder / name}" for key, name in files.items()]
    with _bookie(watched, tmp_path / "certificate", options) as url:

        def seen() -> Seen:
            return look({"bookie-9": ("dlog-bookie", url)})

        during = seen()
        operator.look("DlogCertificateEnds")
        (folder / "bookie.pem").unlink()  # as the page says
        assert "made cluster/hosts/node-1/bookie.pem" in operator.act("DlogCertificateEnds")
        wait_until(lambda: not firing("DlogCertificateEnds", tmp_path, seen())[0], timeout_s=WAIT_S)
        require_fires(["DlogCertificateEnds"], tmp_path, {}, during, seen)


def test_a_full_disk(watched: Watched, tmp_path: Path, operator: Operator) -> None:
    """Another program fills the file system of a bookie."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = [
        f"--space-read-only-below-bytes={16 * MIB}",
        f"--space-writable-above-bytes={20 * MIB}",
        f"--space-minimum-bytes={4 * MIB}",
        f"--file-bytes-max={8 * MIB}",
        "--space-check-interval-s=0.1",
    ]
    mount = f'mount -t tmpfs -o size={256 * MIB} none {folder} && exec "$@"'
    privileges = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    wrapper = ["unshare", *privileges, "--mount", "sh", "-c", mount, "sh"]

    with (
        _bookie(watched, folder / "data", options, wrapper=wrapper) as url,
        open_namespace(watched.sandbox.uri) as namespace,
    ):
        writable = "dlog_bookie_writable"
        before = look({"bookie-9": ("dlog-bookie", url)})
        filler = Path(f"/proc/{_pid_of(url)}/root{folder}/filler")
        filler.write_bytes(bytes(256 * MIB - 12 * MIB))
        namespace.create_log("full", config=LogConfig(quorum=QuorumConfig(4, 4, 2)))
        with namespace.open_log("full").open_writer() as writer:  # it looks when it is written to
            writer.write(LogRecord(0, b"x"))
        wait_until(lambda: not scraped(url, writable)[writable][()], timeout_s=WAIT_S)
        during = look({"bookie-9": ("dlog-bookie", url)})
        with namespace.open_log("first") as log:
            log.move_subscription("report", txid=0)
        assert "read-only" in operator.look("DlogBookieReadOnly", "DlogDiskNearlyFull")
        operator.act("DlogBookieReadOnly")
        operator.act("DlogDiskNearlyFull")
        filler.unlink()
        wait_until(lambda: scraped(url, writable)[writable][()], timeout_s=WAIT_S)
        healed = look({"bookie-9": ("dlog-bookie", url)})
    alerts = ["DlogBookieReadOnly", "DlogDiskNearlyFull"]
    require_fires(alerts, tmp_path, before, during, lambda: healed)


def test_an_audit_log_that_cannot_be_written(
    watched: Watched, tmp_path: Path, shell: Shell
) -> None:
    """Its file is on a device that is full."""
    good = str(tmp_path / "audit.log")

    def look_at(path: str) -> Seen:
        port = free_ports(1)
        options = ("--audit-file", path, "--http-address", f"127.0.0.1:{port}")
        with proxy_process(watched.sandbox.uri, *options) as proxy:
            shell.outcome("--endpoint", proxy.location, "log", "create", f"audited-{port}")
            url = f"http://127.0.0.1:{port}"
            operator = Operator(shell, {"proxy": url}, {"/var/lib/dlog/audit.jsonl": good})
            seen = operator.look("DlogAuditLogFailing")
            assert ("No space left on device" in seen) == (path != good)
            operator.act("DlogAuditLogFailing")
            return look({"proxy-9": ("dlog-proxy", url)})

    before, during, healed = look_at(good), look_at("/dev/full"), look_at(good)
    require_fires(["DlogAuditLogFailing"], tmp_path, before, during, lambda: healed)


def test_a_query_that_is_behind(tmp_path: Path, operator: Operator) -> None:
    """The listener of a session exports the lag that the source reports."""

    def seen(seconds: float) -> Seen:
        registry = CollectorRegistry()
        listener = ProgressListener(prints=False, registry=registry)
        lag = LagReport(logs={"clicks": Lag(records=9, seconds=seconds)}, ends={"clicks": "1:0:0"})
        progress = SimpleNamespace(
            name="etl",
            id="id",
            runId="run",
            batchId=1,
            timestamp="2026-05-01T12:00:00.000Z",
            numInputRows=1,
            inputRowsPerSecond=1.0,
            processedRowsPerSecond=1.0,
            batchDuration=1,
            sources=[SimpleNamespace(latestOffset=json.dumps(lag.to_json()))],
        )
        listener.onQueryProgress(SimpleNamespace(progress=progress))  # type: ignore[arg-type]
        return samples_of(generate_latest(registry).decode(), {"job": "spark"})

    operator.look("DlogQueryBehind")
    require_fires(["DlogQueryBehind"], tmp_path, seen(2.0), seen(900.0), lambda: seen(2.0))


def test_a_subscriber_that_is_behind(
    watched: Watched, tmp_path: Path, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not read what was written an hour ago, by the writer's clock, until it is deleted."""
    behind, log = "autorecovery_subscriber_seconds_behind", 'log="behind"'
    before = watched.look()
    with open_namespace(watched.sandbox.uri) as namespace:
        with monkeypatch.context() as patch:
            patch.setattr(SystemClock, "now_ms", lambda _: time.time_ns() // 10**6 - 3_600_000)
            with namespace.open_log("behind", create_if_missing=True).open_writer() as writer:
                writer.write(LogRecord(1, b"x"))
        namespace.open_log("behind").move_subscription("report", txid=0)
    wait_until(
        lambda: any(behind in name and log in name for name in watched.look()), timeout_s=WAIT_S
    )
    during = watched.look()
    operator = operator.knowing(LOG="behind")
    assert "report" in operator.look("DlogSubscriberBehind")
    operator.act("DlogSubscriberBehind")
    wait_until(lambda: log not in str(watched.look()), timeout_s=WAIT_S)
    require_fires(["DlogSubscriberBehind"], tmp_path, before, during, watched.look)


def _pause(*bookies: Bookie) -> None:
    for each in bookies:
        each.pause()


def _resume(*bookies: Bookie) -> None:
    for each in bookies:
        each.resume()


@contextmanager
def _bookie(
    watched: Watched, folder: Path, options: list[str], *, wrapper: list[str] | None = None
) -> Iterator[str]:
    """Run one more bookie; yield the URL of its port for operators."""
    port = free_ports(1)
    command = [sys.executable, "-m", "bookie", "--name", f"bookie-{folder.name}"]
    command += ["--metadata-uri", watched.sandbox.uri, "--data-dir", str(folder)]
    command += ["--http-address", f"127.0.0.1:{port}", *options]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([*(wrapper or []), *command], cwd=REPOSITORY) as process:
        try:
            wait_until(lambda: _answers(url), timeout_s=WAIT_S)
            yield url
            process.terminate()
            process.wait(WAIT_S)
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        return asked(f"{url}/health/live")[0] == 200
    except OSError:
        return False


def _pid_of(url: str) -> int:
    """Return the process that listens there, by its open sockets."""
    port = url.rpartition(":")[2]
    listed = subprocess.run(
        ["ss", "-Hltnp", f"sport = :{port}"], capture_output=True, text=True, check=True
    )
    return int(listed.stdout.partition("pid=")[2].partition(",")[0])
