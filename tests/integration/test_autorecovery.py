"""Goal: lost disks are made good on real processes.  Method: kill, wipe, wait until all is back."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from dlcore import LogConfig, LogRecord, QuorumConfig
from dlcore.base.errors import DLError
from dlcore.ops.cli.app import EXIT_FAILED, run
from dlcore.ops.sandbox.cluster import AutoRecoveryProcess
from dlcore.sync import open_namespace
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import DistributedLogManager, Namespace

pytestmark = pytest.mark.integration

WAIT_S = 120.0
QUICK = (
    "--lost-bookie-delay-s=1",
    "--open-ledger-grace-s=6",
    "--audit-interval-s=10",
    "--poll-interval-s=0.5",
    "--retry-pause-s=0.5",
)
BOOKIE = ("--session-timeout-s=8",)
CONFIG = LogConfig(quorum=QuorumConfig(), entry_bytes=4096)


class Operator:
    """Runs commands in this process and keeps what they print."""

    def __init__(self, uri: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.uri = uri
        self._capsys = capsys

    def outcome(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command; return its exit code and what it printed."""
        self._capsys.readouterr()
        exit_code = run(["--uri", self.uri, *arguments])
        captured = self._capsys.readouterr()
        return exit_code, captured.out, captured.err

    def status(self) -> Any:
        """Return `dlog autorecovery status`."""
        exit_code, out, err = self.outcome("autorecovery", "status", "--json")
        assert exit_code == 0, err
        return json.loads(out)

    def check(self, ledger_id: int) -> tuple[bool, Any]:
        """Return whether `dlog ledger check` found everything, and what it said."""
        exit_code, out, err = self.outcome("ledger", "check", str(ledger_id), "--json")
        assert not err
        answer = json.loads(out)
        assert exit_code == (0 if answer["replicated"] else EXIT_FAILED)
        return answer["replicated"], answer


@pytest.fixture
def start(fresh_sandbox: Callable[..., Sandbox]) -> Callable[..., Sandbox]:
    """Start a cluster whose auto-recovery is quick, unless set otherwise."""

    def start_quick(bookies: int, *options: str) -> Sandbox:
        return fresh_sandbox(
            bookies,
            autorecovery=True,
            autorecovery_options=[*QUICK, *options],
            bookie_options=BOOKIE,
        )

    return start_quick


def ledgers_of(log: DistributedLogManager) -> list[int]:
    """Return the ledgers of a log."""
    return [e.ledger_id for segment in log.get_log_segments() for e in segment.extents]


def members_of(namespace: Namespace, ledger_id: int) -> set[str]:
    """Return the names of the bookies that a ledger's metadata refers to."""
    metadata = namespace.get_ledger(ledger_id)
    return {bookie.name for ensemble in metadata.ensembles for bookie in ensemble.bookies}


def make_log(namespace: Namespace, name: str, *, records: int, size: int = 1000) -> None:
    """Write a log and close it."""
    namespace.create_log(name, config=CONFIG)
    with namespace.open_log(name) as log, log.open_writer() as writer:
        for txid in range(records):
            writer.write(LogRecord(txid, b"%07d" % txid * (size // 7)))


def txids_of(namespace: Namespace, name: str) -> list[int]:
    """Return the transaction ids of all readable records."""
    with namespace.open_log(name) as log, log.open_reader() as reader:
        return [record.txid for record in reader.read_bulk(10**6)]


class LiveWriter:
    """Writes to a log in a thread of its own until it is stopped; every commit must succeed."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        namespace.create_log(name, config=CONFIG)
        self._writer = namespace.open_log(name).open_writer()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.committed = 0
        self.error: DLError | None = None

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.02):
                self._writer.write(LogRecord(self.committed, b"x" * 500))
                self._writer.commit()
                self.committed += 1
        except DLError as error:
            self.error = error

    def __enter__(self) -> LiveWriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._writer.close()


def test_a_wiped_bookie_is_made_good_while_a_writer_goes_on(
    start: Callable[..., Sandbox], capsys: pytest.CaptureFixture[str]
) -> None:
    """Four bookies, one is killed and its disk wiped: closed and open ledgers get new replicas."""
    sandbox = start(4)
    operator = Operator(sandbox.uri, capsys)
    with open_namespace(sandbox.uri) as namespace:
        make_log(namespace, "closed", records=300)
        (closed,) = ledgers_of(namespace.open_log("closed"))
        with LiveWriter(namespace, "open") as writer:
            wait_until(lambda: writer.committed > 20, timeout_s=WAIT_S)
            (is_open,) = ledgers_of(namespace.open_log("open"))
            shared = members_of(namespace, closed) & members_of(namespace, is_open)
            victim = next(each for each in sandbox.bookies if each.name in shared)
            victim.kill()
            shutil.rmtree(victim.folder)
            for ledger_id in (closed, is_open):
                wait_until(
                    lambda ledger_id=ledger_id: (  # type: ignore[misc]  # bound now, not later
                        victim.name not in members_of(namespace, ledger_id)
                    ),
                    timeout_s=WAIT_S,
                )
            wait_until(lambda: not operator.status()["ledgers"], timeout_s=WAIT_S)
            before = writer.committed
            wait_until(lambda: writer.committed > before + 20, timeout_s=WAIT_S)
            assert writer.error is None
        for ledger_id in (closed, is_open):
            wait_until(
                lambda ledger_id=ledger_id: operator.check(ledger_id)[0],  # type: ignore[misc]
                timeout_s=WAIT_S,
            )
            _, answer = operator.check(ledger_id)
            assert {row["state"] for row in answer["replicas"]} == {"holds"}
            assert {row["bookie"].split("/")[0] for row in answer["replicas"]} <= {
                each.name for each in sandbox.bookies if each is not victim
            }
        assert txids_of(namespace, "closed") == list(range(300))
        assert txids_of(namespace, "open") == list(range(writer.committed))


def test_a_copy_that_was_cut_off_by_a_kill_is_finished_by_the_next_one(
    start: Callable[..., Sandbox], capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL in the middle of a copy: the metadata is as it was, and another process goes on."""
    sandbox = start(4, "--copy-bytes-per-s=40000")  # 20 seconds, of which three pass
    operator = Operator(sandbox.uri, capsys)
    service = sandbox.autorecovery
    assert service is not None
    with open_namespace(sandbox.uri) as namespace:
        make_log(namespace, "log", records=800)
        (ledger_id,) = ledgers_of(namespace.open_log("log"))
        before = namespace.get_ledger(ledger_id)
        members = members_of(namespace, ledger_id)
        victim = next(each for each in sandbox.bookies if each.name in members)
        (spare,) = (each for each in sandbox.bookies if each.name not in members)
        log_file = spare.folder
        size_before = _size_of(log_file)
        victim.kill()
        shutil.rmtree(victim.folder)
        wait_until(lambda: _size_of(log_file) > size_before + 100_000, timeout_s=WAIT_S)
        service.kill()
        assert namespace.get_ledger(ledger_id) == before
        with second_process(sandbox):
            wait_until(
                lambda: victim.name not in members_of(namespace, ledger_id), timeout_s=WAIT_S
            )
            wait_until(lambda: not operator.status()["ledgers"], timeout_s=WAIT_S)
        assert operator.check(ledger_id)[0]
        assert txids_of(namespace, "log") == list(range(800))


def _size_of(folder: Any) -> int:
    """Return the bytes that a bookie wrote, without the space that it allocated ahead."""
    return sum(len(each.read_bytes().rstrip(b"\0")) for each in folder.glob("*.log"))


def test_a_bookie_is_decommissioned(
    start: Callable[..., Sandbox], capsys: pytest.CaptureFixture[str]
) -> None:
    """It must be stopped; what blocks it is said; afterwards nothing refers to it."""
    sandbox = start(4)
    operator = Operator(sandbox.uri, capsys)
    service = sandbox.autorecovery
    assert service is not None
    with open_namespace(sandbox.uri) as namespace:
        make_log(namespace, "log", records=100)
        (ledger_id,) = ledgers_of(namespace.open_log("log"))
        name = sorted(members_of(namespace, ledger_id))[0]
        bookie = next(each for each in sandbox.bookies if each.name == name)

        decommission = ("bookie", "decommission", name, "--yes")
        exit_code, _, err = operator.outcome(*decommission)
        assert exit_code == EXIT_FAILED
        assert f"bookie {name} is registered at {bookie.address}: stop it first" in err
        exit_code, _, err = operator.outcome("bookie", "decommission", "unknown", "--yes")
        assert exit_code == 2
        assert "unknown" in err

        assert operator.outcome("autorecovery", "pause")[0] == 0
        assert operator.status()["paused"]
        bookie.terminate()
        exit_code, _, err = operator.outcome(*decommission, "--timeout", "0")
        assert exit_code == EXIT_FAILED
        assert err.count("auto-recovery is paused") == 2  # at once, and at the end
        found, answer = operator.check(ledger_id)
        assert not found
        missing = {row["state"]: row["missing_entries"] for row in answer["replicas"]}
        assert missing == {"holds": 0, "unknown": None}

        assert operator.outcome("autorecovery", "pause", "--off")[0] == 0
        exit_code, out, err = operator.outcome(*decommission)
        assert exit_code == 0, err
        assert f"decommissioned {name}" in out
        assert f"Give up bookie {name} for good" in err
        assert name not in members_of(namespace, ledger_id)
        assert operator.check(ledger_id)[0]
        with pytest.raises(Exception, match="the cluster has no cookie"):
            bookie.restart()
        assert operator.outcome(*decommission)[0] == 2  # it is unknown now
        assert txids_of(namespace, "log") == list(range(100))


def test_when_the_auditor_is_killed_another_one_takes_over(
    start: Callable[..., Sandbox], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes on a real ZooKeeper; the second one also ends in order on SIGTERM."""
    sandbox = start(1)
    operator = Operator(sandbox.uri, capsys)
    first = sandbox.autorecovery
    assert first is not None
    wait_until(lambda: operator.status()["auditor"], timeout_s=WAIT_S)
    assert operator.status()["auditor"].endswith(f":{first.pid}")
    with second_process(sandbox) as second:
        wait_until(lambda: "at work" in second.log_path.read_text(), timeout_s=WAIT_S)
        assert operator.status()["auditor"].endswith(f":{first.pid}")
        first.kill()
        wait_until(
            lambda: str(operator.status()["auditor"]).endswith(f":{second.pid}"), timeout_s=WAIT_S
        )
        wait_until(lambda: operator.status()["last_check"], timeout_s=WAIT_S)
        second.terminate()
        assert operator.status()["auditor"] is None


@contextmanager
def second_process(sandbox: Sandbox) -> Iterator[AutoRecoveryProcess]:
    """Run one more auto-recovery process of a sandbox."""
    process = AutoRecoveryProcess(options=QUICK, cluster=sandbox)
    process.restart()
    try:
        yield process
    finally:
        process.terminate()


def test_a_ledger_is_recovered_by_hand(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """The writer is fenced, the ledger closed; a second time changes nothing."""
    operator = Operator(sandbox.uri, capsys)
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log("recovered-by-hand", config=CONFIG)
        writer = namespace.open_log("recovered-by-hand").open_writer()
        writer.write(LogRecord(1, b"x"))
        writer.commit()
        (ledger_id,) = ledgers_of(namespace.open_log("recovered-by-hand"))
        for said in (["--yes"], []):  # a ledger that is closed has no writer to lose
            exit_code, out, err = operator.outcome(
                "ledger", "recover", str(ledger_id), "--json", *said
            )
            assert exit_code == 0, err
            assert json.loads(out)["last_entry"] >= 0
        assert namespace.get_ledger(ledger_id).state.name == "CLOSED"
        exit_code, _, err = operator.outcome("ledger", "recover", "999999999")
        assert exit_code == EXIT_FAILED
        assert "999999999" in err
