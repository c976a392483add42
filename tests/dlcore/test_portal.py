"""The portal: one loop per process, refused where it cannot work."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from dlcore._portal import Portal, shared_portal
from dlcore.errors import AlreadyClosedError, ConfigurationError


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


def test_a_forked_child_is_told_to_open_its_own() -> None:
    """What was opened before the fork fails clearly; a new portal works in the child."""
    code = """
import asyncio, os, sys
from dlcore._portal import shared_portal
from dlcore.errors import ConfigurationError
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
