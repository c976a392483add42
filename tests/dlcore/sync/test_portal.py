"""The portal: one loop per process, refused where it cannot work."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlcore.base.errors import AlreadyClosedError, ConfigurationError
from dlcore.sync import portal as portals
from dlcore.sync.portal import Portal, shared_portal
from tests.fixtures.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]


def test_results_and_errors_cross_the_threads() -> None:
    """The coroutine runs in another thread; its error is raised here."""

    async def where() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise ConfigurationError("no")

    portal = Portal()
    assert portal.call(where()) == "dlcore-portal"
    with pytest.raises(ConfigurationError, match="no"):
        portal.call(fail())
    portal.stop()
    portal.stop()
    with pytest.raises(AlreadyClosedError):
        portal.call(where())


def test_it_refuses_its_own_loop() -> None:
    """It would wait for itself."""
    portal = Portal()

    async def inner() -> None:
        portal.call(asyncio.sleep(0))

    with pytest.raises(ConfigurationError, match="async API"):
        portal.call(inner())
    portal.stop()


def test_a_forked_child_must_open_its_own() -> None:
    """Objects opened before the fork fail clearly; a new portal works in the child."""
    code = """
import asyncio, os, sys
from dlcore.sync.portal import shared_portal
from dlcore.base.errors import ConfigurationError
parent = shared_portal()
assert parent.call(asyncio.sleep(0, "parent")) == "parent"
pid = os.fork()
if pid == 0:
    try:
        parent.call(asyncio.sleep(0))
    except ConfigurationError as error:
        assert "after a fork" in str(error), error
        assert shared_portal() is not parent
        ok = shared_portal().call(asyncio.sleep(0, "child")) == "child"
        os._exit(0 if ok else 2)
    os._exit(1)
_, status = os.waitpid(pid, 0)
assert parent.call(asyncio.sleep(0, "still")) == "still"
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_process_has_one() -> None:
    """Namespaces share it."""
    assert shared_portal() is shared_portal()
    assert shared_portal()._pid == os.getpid()


def test_at_exit_each_is_closed_whatever_the_others_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: a closer that fails, or never ends, is logged; the others close, the loop stops."""
    closed: list[str] = []

    async def close() -> None:
        closed.append("first")

    async def fail() -> None:
        raise KeyError("mine")

    async def hang() -> None:
        await asyncio.Event().wait()

    async def block() -> None:
        released.wait()

    def release_when_signalled() -> None:
        try:
            wait_until(lambda: "the event loop hangs at exit" in caplog.text, timeout_s=60)
        finally:
            released.set()

    released = threading.Event()
    shared = portals._Shared()
    shared.close()  # nothing was opened
    monkeypatch.setattr(portals, "_shared", shared)
    for late in (False, True):
        monkeypatch.setattr(portals, "_CLOSERS_TIMEOUT_S", 1 if late else 60)
        portal = shared_portal()
        owners = [object() for _ in range(4)]
        for owner, closer in zip(owners, (close, fail, hang, hang), strict=True):
            portals.close_at_exit(owner, closer)
        portals.forget(owners[3])
        if not late:
            portals.forget(owners[2])
        with caplog.at_level(logging.WARNING):
            shared.close()
        assert not portal.is_usable
        assert ("not closed within 1 s" in caplog.text) == late
        assert caplog.text.count("not closed cleanly at exit: KeyError('mine')") == 1 + late
    shared.close()
    assert closed == ["first"] * 2
    monkeypatch.setattr(portals, "_CLOSERS_TIMEOUT_S", 0.1)
    portal = shared_portal()
    portals.close_at_exit(shared, block)
    # The loop itself is blocked: stopping waits for it, once that is logged.
    threading.Thread(target=release_when_signalled).start()
    shared.close()
    assert not portal.is_usable


def test_exit_waits_for_threads_that_may_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for those that they start; a daemon is not waited for."""
    go, ever, main_ends = threading.Event(), threading.Event(), threading.Event()
    main = threading.Thread(target=main_ends.wait)
    main.start()
    others, enumerate_all = set(threading.enumerate()) - {main}, threading.enumerate
    monkeypatch.setattr(  # those of other tests do not end
        threading, "enumerate", lambda: [each for each in enumerate_all() if each not in others]
    )
    monkeypatch.setattr(threading, "main_thread", lambda: main)
    monkeypatch.setattr(portals, "_shared", portals._Shared())
    shared_portal()
    (closing,) = (each for each in threading.enumerate() if each.name == "dlcore-exit")
    order: list[str] = []

    async def close() -> None:
        order.append("closed")

    def write() -> None:
        go.wait()
        later = threading.Thread(target=lambda: order.append("written"))
        later.start()
        order.append("started another")

    portals.close_at_exit(order, close)
    threading.Thread(target=ever.wait, daemon=True).start()
    writer = threading.Thread(target=write)
    writer.start()
    shared_portal()  # one thread is enough
    assert [each.name for each in threading.enumerate()].count("dlcore-exit") == 1
    main_ends.set()
    main.join(30)
    assert closing.is_alive()
    assert order == []
    go.set()
    closing.join(30)
    ever.set()
    assert sorted(order[:2]) == ["started another", "written"]
    assert order[2:] == ["closed"]


AT_EXIT = """
import threading
from dlcore.sync import portal as portals

async def close():
    print("closed")

def write():
    threading.main_thread().join()
    portals.shared_portal().post(lambda: None)
    print("written")

portals.shared_portal()
portals.close_at_exit(portals, close)
threading.Thread(target=write).start()
print("left")
"""


def test_each_python_closes_what_is_open_when_it_exits() -> None:
    """Once the last thread has written; Python 3.12 starts no thread any more by then."""
    command = [sys.executable, "-c", AT_EXIT]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert (ended.stdout.split(), ended.stderr) == (["left", "written", "closed"], "")


def test_a_loss_shows_in_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ends with 120 if the last flush of a standard stream fails."""
    stream = io.StringIO()
    for given in (stream, None):
        monkeypatch.setattr(sys, "stderr", given)
        monkeypatch.setattr(portals, "_exit_fails", False)
        portals._spoil_stderr()
        assert sys.stderr is given
        portals.fail_exit()
        portals._spoil_stderr()
        spoiled: Any = sys.stderr
        with pytest.raises(OSError, match="not written"):
            spoiled.flush()
        assert not spoiled.closed
    monkeypatch.setattr(sys, "stderr", stream)
    portals._spoil_stderr()
    sys.stderr.write("still works")
    assert stream.getvalue() == "still works"


def test_objects_inherited_by_a_fork_are_refused_and_left_alone() -> None:
    """The thread is the parent's: neither calls nor stopping reach it."""
    portal = Portal()
    portal._pid -= 1
    assert not portal.is_usable
    with pytest.raises(
        ConfigurationError, match=rf"opened in process {portal._pid} .* {os.getpid()}"
    ):
        portal.post(lambda: None)
    portal.stop()
    portal._pid += 1
    assert portal.call(asyncio.sleep(0, "alive")) == "alive"
    portal.stop()


def test_pyarrow_is_imported_before_a_fork_only_if_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child would wait for ever for the lock of a thread that imports it."""
    arrays: list[list[object]] = []
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(array=arrays.append))
    portals._let_pyarrow_finish()
    assert arrays == [[]]
    monkeypatch.delitem(sys.modules, "pyarrow")
    portals._let_pyarrow_finish()
    assert "pyarrow" not in sys.modules
