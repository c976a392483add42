"""A network to break: a proxy in front of each server, which knows which process calls.

Everybody connects to a server's proxy instead of the server.  The proxy finds out who calls from
the kernel's table of sockets, so that a rule can hold for one client and one bookie alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlcore.ops.sandbox.process import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_CHUNK_BYTES = 64 * 1024
_SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
UNKNOWN = "?"


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """The faults on the links from `sources` to `endpoints` while the rule is in force.

    Held data arrives once the rule is gone, as TCP sends again what was lost.
    """

    sources: frozenset[str]
    endpoints: frozenset[str]
    cut: bool = False
    """Connections are reset, new ones too."""
    holds_requests: bool = False
    holds_answers: bool = False
    delay_s: float = 0.0
    """Each piece of data comes this much later."""


@dataclass(slots=True, eq=False)
class _Connection:
    source: str
    endpoint: str
    transports: list[asyncio.WriteTransport]

    def abort(self) -> None:
        for transport in self.transports:
            transport.abort()


class Network:
    """The proxies of a run, and the rules in force; used on one event loop.

    Args:
        processes: returns the process ids of those who connect, by name.
    """

    def __init__(self, processes: Callable[[], Mapping[str, int]]) -> None:
        self._processes = processes
        self._rules: list[Rule] = []
        self._changed = asyncio.Event()
        self._connections: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open_proxy(self, endpoint: str, port: Callable[[], int]) -> int:
        """Forward to `port` of this machine what comes to the port that is returned."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(asyncio.CancelledError):  # asyncio would print it
                await self._serve(endpoint, port(), reader, writer)

        server = await asyncio.start_server(accept, HOST, 0, limit=_CHUNK_BYTES)
        self._servers.append(server)
        listening: int = server.sockets[0].getsockname()[1]
        return listening

    def add_rule(self, rule: Rule) -> None:
        """Put a rule in force, beside those that are."""
        self._rules.append(rule)
        self._notify()
        if rule.cut:
            self.reset(rule)

    def remove_rule(self, rule: Rule) -> None:
        """Let a rule go."""
        self._rules.remove(rule)
        self._notify()

    def reset(self, rule: Rule) -> None:
        """Reset the present connections of the links of `rule`."""
        for connection in list(self._connections):
            if connection.source in rule.sources and connection.endpoint in rule.endpoints:
                connection.abort()

    async def aclose(self) -> None:
        """Close everything."""
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _rules_of(self, source: str, endpoint: str) -> list[Rule]:
        return [
            rule for rule in self._rules if source in rule.sources and endpoint in rule.endpoints
        ]

    async def _serve(
        self,
        endpoint: str,
        port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        source = self._identify(writer)
        connection = _Connection(source, endpoint, [writer.transport])
        self._connections.add(connection)
        try:
            if any(rule.cut for rule in self._rules_of(source, endpoint)):
                return
            there, back = await asyncio.open_connection(HOST, port, limit=_CHUNK_BYTES)
            connection.transports.append(back.transport)
            await asyncio.gather(
                self._pump(connection, reader, back, is_request=True),
                self._pump(connection, there, writer, is_request=False),
            )
        except OSError:
            pass  # either side is gone: the other learns of it below
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def _pump(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        is_request: bool,
    ) -> None:
        while True:
            data = await reader.read(_CHUNK_BYTES)
            await self._pass(connection, is_request=is_request)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _pass(self, connection: _Connection, *, is_request: bool) -> None:
        """Wait as long as the rules say."""
        rules = self._rules_of(connection.source, connection.endpoint)
        delay_s = max((rule.delay_s for rule in rules), default=0.0)
        if delay_s:
            await asyncio.sleep(delay_s)
        while True:
            changed = self._changed
            rules = self._rules_of(connection.source, connection.endpoint)
            if not any(rule.holds_requests if is_request else rule.holds_answers for rule in rules):
                return
            await changed.wait()

    def _identify(self, writer: asyncio.StreamWriter) -> str:
        """Return the name of the process at the other end."""
        inode = _inode_of(
            local_port=writer.get_extra_info("peername")[1],
            remote_port=writer.get_extra_info("sockname")[1],
        )
        wanted = f"socket:[{inode}]"
        for name, pid in self._processes().items():
            if inode is not None and _has_open(pid, wanted):
                return name
        return UNKNOWN


def _inode_of(*, local_port: int, remote_port: int) -> str | None:
    local, remote = f":{local_port:04X}", f":{remote_port:04X}"
    for table in _SOCKET_TABLES:
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(local) and fields[2].endswith(remote):
                return fields[9]
    return None


def _has_open(pid: int, wanted: str) -> bool:
    with contextlib.suppress(OSError):  # it has just ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # just closed
                if str(descriptor.readlink()) == wanted:
                    return True
    return False
