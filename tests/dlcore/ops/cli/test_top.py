"""`dlog top` over a cluster: one view for scripts, a live one in a terminal until Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.records import LogRecord
from dlcore.ops.cli.app import run
from dlcore.ops.diagnosis import asking, looking
from dlcore.sync import open_namespace
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.operators import LASTING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

WAIT_S = 60


def viewed(capsys: pytest.CaptureFixture[str], uri: str, *options: str) -> Any:
    """Return the view as JSON."""
    capsys.readouterr()
    assert run(["top", "--json", "--interval", "0.1", "--uri", uri, *options]) == 0
    return json.loads(capsys.readouterr().out)


def be_patient(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a look wait so long for each server."""
    for module in (asking, looking):
        monkeypatch.setattr(module, "PATIENCE_S", seconds)
    monkeypatch.setattr(looking, "PART_S", 2 * seconds)


def test_one_view_also_of_a_cluster_that_hangs(
    fresh_sandbox: Callable[..., Sandbox],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bookie and a proxy that do not answer are rows of it."""
    be_patient(monkeypatch, WAIT_S)
    lasting = {"bookie_options": (LASTING,), "proxy_options": (LASTING,)}
    cluster = fresh_sandbox(3, proxies=1, **lasting)
    with open_namespace(cluster.uri) as namespace:
        for name in ("clicks[red]", "views"):
            namespace.create_log(name)
            with namespace.open_log(name) as log, log.open_writer() as writer:
                writer.write(LogRecord(txid=1, payload=b"x"))
                writer.commit()
        with namespace.open_log("views") as log:
            log.move_subscription("reader", dlsn=log.get_first_dlsn())
        view = viewed(capsys, cluster.uri)
        assert {row["log"]: row["lag"] for row in view["logs"]} == {
            "clicks[red]": None,
            "views": 1,
        }
        assert [row["state"] for row in view["bookies"]] == ["writable"] * 3
        assert [row["state"] for row in view["proxies"]] == ["serves"]
        assert (view["recovery"], view["under_replicated"]) == ("does not run", 0)
        assert (view["problems"], view["broken_logs"]) == ({}, {})
        assert [row["log"] for row in viewed(capsys, cluster.uri, "v")["logs"]] == ["views"]

        with namespace.open_log("views") as log, log.open_writer() as writer:
            writer.write(LogRecord(txid=2, payload=b"x"))
            writer.commit()
            owners = {row["log"]: row["owner"] for row in viewed(capsys, cluster.uri)["logs"]}
        assert owners["clicks[red]"] is None
        assert str(os.getpid()) in owners["views"]

    be_patient(monkeypatch, 1.0)
    cluster.bookies[0].pause()
    cluster.proxies[0].pause()
    assert run(["top", "--once", "--interval", "0.1", "--uri", cluster.uri]) == 0
    shown = capsys.readouterr().out
    assert "clicks[red]" in shown
    assert shown.count("no answer") >= 2
    monkeypatch.setattr(looking, "PART_S", 0.0)
    assert "no answer within 0 s" in viewed(capsys, cluster.uri)["problems"]["bookies"]


def test_the_live_view_ends_cleanly(fresh_sandbox: Callable[..., Sandbox]) -> None:
    """By Ctrl-C, with code 0, without a traceback, and with the terminal as it was."""
    cluster = fresh_sandbox(3)
    with open_namespace(cluster.uri) as namespace:
        namespace.create_log("clicks")
    mine, its = pty.openpty()
    command = [sys.executable, "-m", "dlcore.ops.cli", "top", "--uri", cluster.uri]
    with subprocess.Popen(
        [*command, "--interval", "0.2"],
        cwd=REPOSITORY,
        stdin=its,
        stdout=its,
        stderr=its,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
    ) as process:
        os.close(its)
        shown = b""
        try:
            while shown.count(b"bookie-3") < 3:  # it goes on drawing
                assert select.select([mine], [], [], WAIT_S)[0], shown
                shown += os.read(mine, 65536)
            process.send_signal(signal.SIGINT)
            while select.select([mine], [], [], WAIT_S)[0]:
                try:
                    shown += os.read(mine, 65536)
                except OSError:  # its end
                    break
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            os.close(mine)
    assert b"clicks" in shown
    assert b"Traceback" not in shown
    assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"\x1b[?1049h")
