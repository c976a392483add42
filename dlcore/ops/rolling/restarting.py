"""Performs a rolling restart: looks at the cluster, drains proxies, and runs commands."""

from __future__ import annotations

import asyncio
import shlex
from typing import TYPE_CHECKING, assert_never

from dlcore.backends.flight.endpoint import Endpoint
from dlcore.backends.flight.planning import act
from dlcore.base.errors import DLError
from dlcore.base.machines import run_to_end
from dlcore.flight import actions
from dlcore.flight.requests import NoRequest
from dlcore.ledger.metadata.values import BookieCookie
from dlcore.metadata.stored import decode
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.diagnosis.asking import ask_proxies
from dlcore.ops.rolling.restart import (
    Drain,
    Event,
    Look,
    Member,
    Restarted,
    RollingRestart,
    Run,
    Seen,
    Signal,
    Stepped,
    Undrain,
    Work,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.access.tls import TlsFiles
    from dlcore.flight.answers import NoAnswer

_DRAIN_PATIENCE_S = 60.0
_UNDRAIN_PATIENCE_S = 15.0
"""Shorter: an operator waits for it after Ctrl-C, and the proxy may be down."""
_OUTPUT_MAX = 500


async def find_members(namespace: DirectNamespace) -> list[Member]:
    """Return the registered bookies and the live proxies."""
    bookies = [
        Member(name=each.name, address=each.address, rack=each.rack, read_only=each.read_only)
        for each in await namespace.get_bookies()
    ]
    proxies = [
        Member(name=location, address=location.partition("://")[2], is_proxy=True)
        for location in await namespace.get_proxies()
    ]
    return bookies + proxies


class Restarter:
    """Restarts members of a namespace's cluster.

    Args:
        namespace: the namespace.
        run: runs the command of a member.
        report: called with each step, in words.
        tls: the files for connections to proxies, and `token` the token, if they need one.
    """

    def __init__(
        self,
        namespace: DirectNamespace,
        *,
        run: Callable[[Member], Awaitable[None]],
        report: Callable[[str], object],
        tls: TlsFiles | None = None,
        token: Callable[[], str] | None = None,
    ) -> None:
        self._namespace = namespace
        self._run = run
        self._report = report
        self._tls = tls
        self._token = token

    async def restart(
        self, members: Sequence[Member], chosen: Sequence[Member], *, patience_s: float
    ) -> Restarted:
        """Restart the chosen of all members, one after the other; return how it ended.

        When it is cancelled, or a signal ends the process, a proxy that is drained takes logs again
        before that.
        """
        now_s = asyncio.get_running_loop().time
        machine = RollingRestart(members, chosen, patience_s=patience_s, now_s=now_s())

        async def answer_of(work: Work) -> Event:
            match work:
                case Look(after_s):
                    await asyncio.sleep(after_s)
                    return await self._look(members)
                case Drain(member):
                    self._report(f"draining {member.name}")
                    await self._tell(member, actions.DRAIN, patience_s=_DRAIN_PATIENCE_S)
                case Undrain(member):
                    self._report(f"letting {member.name} take logs again")
                    await self._tell(member, actions.UNDRAIN, patience_s=_UNDRAIN_PATIENCE_S)
                case Run(member):
                    self._report(f"restarting {member.name}")
                    await self._run(member)
                case _:
                    assert_never(work)
            return Stepped(now_s())

        try:
            return await run_to_end(machine, Signal.BEGIN, answer_of)
        except (asyncio.CancelledError, SystemExit):
            # A handler of SIGTERM that exits does so here if the signal comes while this runs, and
            # cancels this task if the event loop waits.
            ended = await run_to_end(machine, Signal.INTERRUPTED, answer_of)
            self._report(f"stopped: {ended.reason}")
            raise

    async def _look(self, members: Sequence[Member]) -> Seen:
        ports = self._namespace.ports
        registered = await self._namespace.get_bookies()
        cookie_paths = [ports.paths.cookie(each.name) for each in registered]
        cookies = await ports.store.get_many(cookie_paths, fresh=True)
        lives = {
            each.name: str(decode(BookieCookie, node.value, source=path).life)
            for each, path, node in zip(registered, cookie_paths, cookies, strict=True)
            if node is not None
        }
        proxies = [member.name for member in members if member.is_proxy]
        nodes = await ports.store.get_many([ports.paths.proxy(name) for name in proxies])
        there = {
            name: node.session
            for name, node in zip(proxies, nodes, strict=True)
            if node is not None
        }
        for answer in await ask_proxies(there, tls=self._tls, token=self._token):
            report = answer.report
            if report is not None and report.serves and report.degraded is None:
                lives[answer.server] = there[answer.server]
        listed = RepairList(ports.store, ports.paths, ports.clock)
        missing = [ledger_id async for ledger_id in listed.ledger_ids()]
        return Seen(lives, len(missing), asyncio.get_running_loop().time())

    async def _tell(
        self, member: Member, action: actions.Action[NoRequest, NoAnswer], *, patience_s: float
    ) -> None:
        async with Endpoint(
            member.name, patience_s=patience_s, tls=self._tls, token=self._token
        ) as calls:
            await act(calls, action, NoRequest())


def command_of(template: str, member: Member) -> list[str]:
    """Return a member's command: ``{name}``, ``{host}`` and ``{port}`` are filled in, each word."""
    values = {"{name}": member.name, "{host}": member.host, "{port}": member.port}
    words = shlex.split(template)
    for key, value in values.items():
        words = [word.replace(key, value) for word in words]
    return words


async def run_command(words: Sequence[str], *, patience_s: float) -> None:
    """Run a command to its end.

    Raises:
        DLError: it cannot be run, failed, or took too long; the message has the end of its output.
    """
    shown = shlex.join(words)
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        raise DLError(f"{shown}: cannot be run: {error}") from error
    try:
        async with asyncio.timeout(patience_s):
            output, _ = await process.communicate()
    except TimeoutError:
        raise DLError(f"{shown}: did not end within {patience_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        report = output.decode(errors="replace").strip()[-_OUTPUT_MAX:]
        raise DLError(f"{shown}: exit code {process.returncode}: {report}")
