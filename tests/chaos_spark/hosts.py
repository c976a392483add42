"""Hosts of processes: each with a network of its own to cut, or all on this machine.

A host is a network namespace behind a cable to one switch.  The program itself lives in network,
mount and process namespaces of its own (see `enter_namespaces`), and so do all hosts: whatever
happens to it, the kernel takes hosts, cables and processes away with it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dlcore.ops.sandbox.process import HOST

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

EXIT_INTERRUPTED = 130
_MARK = "DLOG_CHAOS_HOSTS"
_NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_UNSHARE = (
    ("unshare", *_NAMESPACES),
    ("unshare", "--user", "--map-root-user", *_NAMESPACES),
)
_SET_UP = "ip link set lo up && mount -t tmpfs run /run && ip netns add probe"
_SWITCH = "switch"
_NETWORK = "10.77.0"


class Report(Protocol):
    """The findings of a run; its text is for people."""

    @property
    def is_clean(self) -> bool:
        """Whether no promise was broken."""
        ...


def enter_namespaces(arguments: Sequence[str]) -> None:
    """Start this program again in namespaces of its own, if the user may have them."""
    if _MARK in os.environ:
        return
    os.environ[_MARK] = "no"
    if unshare := launcher_apart():
        os.environ[_MARK] = "yes"
        os.execvp(unshare[0], [*unshare, sys.executable, *arguments])


def run_in_namespaces(run: Coroutine[Any, Any, Report]) -> int:
    """Run a program to its end, print its report, and return its exit code."""
    # The first process of a namespace is not ended by a signal that it has no handler for.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        report = asyncio.run(run)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return EXIT_INTERRUPTED
    print(report, flush=True)
    return int(not report.is_clean)


def launcher_apart() -> tuple[str, ...]:
    """Return what to put before a command that shall run in namespaces of its own.

    Nothing, if the user may not have them.
    """
    if not all(map(shutil.which, ("unshare", "ip", "mount"))):
        return ()
    for unshare in _UNSHARE:
        probe = subprocess.run([*unshare, "sh", "-c", _SET_UP], capture_output=True, check=False)
        if probe.returncode == 0:
            return unshare
    return ()


def can_have_hosts() -> bool:
    """Whether the program runs in namespaces of its own."""
    return os.environ.get(_MARK) == "yes"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Machine:
    """One host for all: this machine's loopback interface."""

    can_cut = False

    def add(self, name: str) -> None:
        """Make a host known."""

    def address(self, _name: str) -> str:
        """Return the address of a host."""
        return HOST

    def launcher(self, _name: str) -> list[str]:
        """Return what to put before a command that a host shall run."""
        return []

    def cut_off(self, name: str) -> None:
        """Pull the cable of a host."""
        raise NotImplementedError(name)

    def join(self, name: str) -> None:
        """Put the cable back."""
        raise NotImplementedError(name)

    def cut(self, one: str, other: str) -> None:
        """Let nothing through between two hosts; each side drops what it sends."""
        raise NotImplementedError(one, other)

    def mend(self, one: str, other: str) -> None:
        """Let everything through again."""
        raise NotImplementedError(one, other)


class Hosts(Machine):
    """Network namespaces on one switch; `folder` takes a file of their names.

    Cuts at one place may overlap: the last one that ends mends it.
    """

    can_cut = True

    def __init__(self, folder: Path) -> None:
        self._numbers: dict[str, int] = {}
        self._cuts: Counter[tuple[str, ...]] = Counter()
        _run("ip", "link", "set", "lo", "up")
        _run("mount", "-t", "tmpfs", "run", "/run")  # where `ip netns` keeps its names
        _run("ip", "link", "add", _SWITCH, "type", "bridge")
        _run("ip", "address", "add", f"{_NETWORK}.1/24", "dev", _SWITCH)
        _run("ip", "link", "set", _SWITCH, "up")
        # No name server can be asked from here: no program shall wait for one.
        self._names = folder / "hosts"
        self._names.write_text("127.0.0.1 localhost\n" + f"127.0.0.1 {os.uname().nodename}\n")
        _run("mount", "--bind", str(self._names), "/etc/hosts")

    def add(self, name: str) -> None:
        """Make a host and plug it in."""
        number = self._numbers[name] = len(self._numbers) + 2
        cable = f"cable{number}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", cable, "master", _SWITCH, "up")
        _run("ip", "-n", name, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        with self._names.open("a") as names:
            names.write(f"{self.address(name)} {name}\n")

    def address(self, name: str) -> str:
        """Return the address of a host."""
        return f"{_NETWORK}.{self._numbers[name]}"

    def launcher(self, name: str) -> list[str]:
        """Return what to put before a command that a host shall run."""
        return ["ip", "netns", "exec", name]

    def cut_off(self, name: str) -> None:
        """Pull the cable of a host."""
        self._cuts[name,] += 1
        _run("ip", "link", "set", f"cable{self._numbers[name]}", "down")

    def join(self, name: str) -> None:
        """Put the cable back."""
        self._cuts[name,] -= 1
        if self._cuts[name,] == 0:
            _run("ip", "link", "set", f"cable{self._numbers[name]}", "up")

    def cut(self, one: str, other: str) -> None:
        """Let nothing through between two hosts; each side drops what it sends."""
        self._cuts[one, other] += 1
        for here, there in ((one, other), (other, one)):
            _run("ip", "-n", here, "route", "replace", "blackhole", f"{self.address(there)}/32")

    def mend(self, one: str, other: str) -> None:
        """Let everything through again."""
        self._cuts[one, other] -= 1
        if self._cuts[one, other]:
            return
        for here, there in ((one, other), (other, one)):
            _run("ip", "-n", here, "route", "delete", "blackhole", f"{self.address(there)}/32")


def descendants(root: int) -> dict[int, str]:
    """Return the command lines of the processes below `root`, by process id."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    found: dict[int, str] = {}
    for pid in parents:
        above = pid
        while above in parents and above != root:
            above = parents[above]
        if above == root and pid != root:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            found[pid] = command.replace(b"\0", b" ").decode(errors="replace")
    return found
