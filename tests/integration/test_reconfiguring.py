"""Settings that change while a program runs: its file is read again on SIGHUP.

Method: a bookie and auto-recovery as processes, whose files are written anew; what they do after
the signal is read in their logs.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.bookie_process import REPOSITORY, bookie_process
from tests.fixtures.lateness import run_in_own_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

pytestmark = pytest.mark.integration

TIME_LIMIT_S = 240


class Log:
    """The lines of a process on standard error, as they come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        self._lines = process.stderr

    async def until(self, text: str, *, count: int = 1) -> list[str]:
        """Return the lines up to the n-th one with `text`."""
        lines: list[str] = []
        while count:
            line = (await self._lines.readline()).decode()
            assert line, f"it ended, and did not say {text!r}: {lines}"
            lines.append(line)
            count -= text in line
        return lines


def test_a_bookie_reads_its_file_again(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """It scrubs at another pace and tells more; what it cannot change or understand it names."""
    uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"
    file = tmp_path / "dlog.toml"
    file.write_text("[bookie]\nscrub_interval_s = 1000\ncompact_interval_s = 1000\n")

    async def scenario() -> None:
        given = ("--config", str(file), "--compact-interval-s", "2000")
        async with bookie_process(uri, "b", tmp_path / "data", *given) as bookie:
            log = Log(bookie.process)
            file.write_text(
                "[bookie]\nscrub_interval_s = 0.05\nport = 1\ncompact_interval_s = 0.05\n"
                'rack = "r7"\nlog_level = "debug"\n'
            )
            bookie.send(signal.SIGHUP)
            lines = await log.until(
                "rack=r7 takes effect after a restart, until then /default-rack"
            )
            kept = "port=1 takes effect after a restart, until then 0"
            assert [line for line in lines if kept in line]
            # The command line counts before the file, as it did.
            assert not [line for line in lines if "compact_interval_s" in line]
            lines = await log.until("scrubbed bookie=b", count=3)

            for text, why in {
                "[bookie]\nscrub_interval_s = 0": "scrub_interval_s=0.0: expected a number > 0",
                "[bookie]\nscrub_interval = 9": "[bookie] scrub_interval=9: there is no such",
                '[bookie]\nlog_level = "loud"': "log_level='loud': expected one of debug, info",
                "[bookie": f"configuration file {file}: ",
            }.items():
                file.write_text(text)
                bookie.send(signal.SIGHUP)
                (*_, line) = await log.until("the configuration stays as it was: ")
                assert why in line
                await log.until("scrubbed bookie=b")  # as before

            file.write_text('[bookie]\nlog_level = "warning"\n')
            bookie.send(signal.SIGHUP)
            await log.until("the configuration was read again")
            bookie.send(signal.SIGTERM)
            status, rest = await bookie.end()
            assert status == 0
            assert "INFO" not in rest.partition("takes effect after a restart")[2]

    run_in_own_time(asyncio.wait_for(scenario(), TIME_LIMIT_S))


def test_without_a_file_the_signal_stops_a_bookie(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """As cleanly as any other: its terminal is gone, perhaps."""
    uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"

    async def scenario() -> None:
        async with bookie_process(uri, "b", tmp_path / "data") as bookie:
            bookie.send(signal.SIGHUP)
            status, errors = await bookie.end()
            assert status == 0
            assert "draining bookie=" in errors

    run_in_own_time(asyncio.wait_for(scenario(), TIME_LIMIT_S))


@asynccontextmanager
async def service(role: str, uri: str, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a service until it says that it is there; what still runs at the end is killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dlcore.ops.cli", *options, role, "run", "--uri", uri,
        cwd=REPOSITORY,
        env={k: v for k, v in os.environ.items() if not k.startswith("DLOG_")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert re.search(b"at work|serving on", await process.stdout.readline())
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        process._transport.close()  # type: ignore[attr-defined]  # else only when collected


def test_autorecovery_reads_its_file_again(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    """It begins anew with other settings; with the same ones, or wrong ones, it goes on."""
    uri = fresh_sandbox(3).uri
    file = tmp_path / "dlog.toml"
    file.write_text("[autorecovery]\nsweep_interval_s = 1000\n")

    async def scenario() -> None:
        async with service("autorecovery", uri, "--config", str(file)) as process:
            log = Log(process)
            await log.until("swept half merged ledgers=0")
            file.write_text("[autorecovery]\nsweep_interval_s = 0\n")
            process.send_signal(signal.SIGHUP)
            (*_, line) = await log.until("the configuration stays as it was: ")
            assert "sweep_interval_s=0.0: expected a number > 0" in line
            with socket.create_server(("127.0.0.1", 0)) as other:
                port = other.getsockname()[1]
                file.write_text(f"[autorecovery]\nhttp_address = '127.0.0.1:{port}'\n")
                process.send_signal(signal.SIGHUP)
                (*_, line) = await log.until("the configuration stays as it was: ")
            assert f"cannot listen on host='127.0.0.1' port={port} for HTTP" in line
            file.write_text("[autorecovery]\nsweep_interval_s = 0.05\nlog_level = 'debug'\n")
            process.send_signal(signal.SIGHUP)
            await log.until("the configuration was read again")
            await log.until("swept half merged ledgers=0", count=3)
            process.send_signal(signal.SIGHUP)
            lines = await log.until("the configuration was read again")
            lines += await log.until("swept half merged ledgers=0", count=2)
            assert not [line for line in lines if "is at work" in line]
            process.send_signal(signal.SIGTERM)
            _, _ = await process.communicate()
            assert process.returncode == 0
        async with service("autorecovery", uri) as process:
            process.send_signal(signal.SIGHUP)
            await process.communicate()
            assert process.returncode == 0

    run_in_own_time(asyncio.wait_for(scenario(), TIME_LIMIT_S))


@pytest.mark.parametrize("role", ["bookie", "proxy", "autorecovery"])
def test_the_level_of_a_module_changes(
    role: str, fresh_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    """In the same way in every server, whose log is of JSON lines with its role and name."""
    uri = fresh_sandbox(1).uri
    file = tmp_path / "dlog.toml"
    file.write_text("[proxy]\nport = 0\n")
    given = ("--config", str(file), "--log-format", "json")

    async def scenario() -> None:
        async with AsyncExitStack() as steps:
            if role == "bookie":
                bookie = await steps.enter_async_context(
                    bookie_process(uri, "one-more", tmp_path / "data", *given)
                )
                process = bookie.process
            else:
                process = await steps.enter_async_context(service(role, uri, *given))
            log = Log(process)
            text = f'[{role}]\nlog_level = "warning,dlcore.base.server_process={{}}"\n'
            file.write_text(text.format("debug"))
            process.send_signal(signal.SIGHUP)
            (*_, line) = map(json.loads, await log.until("the configuration was read again"))
            assert (line["role"], line["level"]) == (role, "warning")
            assert line["name"] == "one-more" or role != "bookie"
            process.send_signal(signal.SIGHUP)
            (*_, line) = map(json.loads, await log.until("the same as before"))
            assert line["level"] == "debug"

            file.write_text(text.format("error"))
            process.send_signal(signal.SIGHUP)
            await log.until("the configuration was read again")
            file.write_text(f'[{role}]\nlog_level = "loud"\n')
            process.send_signal(signal.SIGHUP)
            (*lines, line) = map(json.loads, await log.until("the configuration stays as it was"))
            assert "log_level='loud': expected one of debug" in line["message"]
            # On a busy machine others may warn meanwhile.
            assert not [each for each in lines if each["logger"] == line["logger"]]
            assert {each["level"] for each in lines} <= {"warning", "error"}
            process.send_signal(signal.SIGTERM)
            await process.communicate()
            assert process.returncode == 0

    run_in_own_time(asyncio.wait_for(scenario(), TIME_LIMIT_S))
