"""`dlog bookie`: the storage nodes of a namespace."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from dlcore.base.errors import BookieUnavailableError
from dlcore.base.settings import FILE_VARIABLE
from dlcore.ops.cli.context import (
    CONFIG_KEY,
    NAMESPACE_KEY,
    ask,
    common_options,
    confirmed,
    given_settings,
    lists_names,
    namespace_tls,
    require_consent,
    run_direct,
)
from dlcore.ops.cli.output import Progress, show_done, show_rows, telling_time, time_text

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ledger.metadata.values import BookieCookie

_REGISTRATION_POLL_S = 0.1
_REGISTRATION_POLLS = 100
_INFO_TIMEOUT_S = 10.0
_ABSENT_POLLS = 5
"""Polls before a bookie counts as not registered.  A bookie that moves between the lists of the
writable and the read-only bookies may be in neither list at one poll."""


@click.group("bookie")
@common_options
def bookie_group() -> None:
    """Run bookies, list them, hold or take them out of service."""


@bookie_group.command(
    "run",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def run_bookie(options: tuple[str, ...]) -> None:
    """Run one bookie, until interrupted.

    `python -m bookie` is the same.
    """
    given = given_settings()
    environment = os.environ | {
        variable: str(given[key])
        for variable, key in (("DLOG_URI", NAMESPACE_KEY), (FILE_VARIABLE, CONFIG_KEY))
        if given.get(key)
    }
    # Replace this process: signals, output and exit code are the bookie's.
    os.execve(sys.executable, [sys.executable, "-m", "bookie", *options], environment)


@bookie_group.command(
    "list", epilog="Example: dlog bookie list --uri distributedlog://127.0.0.1:2181/dlog"
)
@lists_names
@common_options
def list_bookies() -> None:
    """List the registered bookies: address, free space and state.

    The free space is at most some minutes old.
    """
    bookies = sorted(
        run_direct(lambda namespace: namespace.get_bookies()), key=lambda info: info.bookie
    )
    rows = [
        {
            "name": info.bookie.name,
            "address": info.address,
            "rack": info.rack,
            "state": "read-only" if info.read_only else "writable",
            "free": _gib(info.free_bytes) if info.total_bytes else "unknown",
            "free_bytes": info.free_bytes if info.total_bytes else None,
            "total_bytes": info.total_bytes or None,
            "incarnation": info.bookie.incarnation,
        }
        for info in bookies
    ]
    show_rows(
        rows,
        columns=("name", "address", "rack", "state", "free", "incarnation"),
        empty="no bookie is registered",
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


@bookie_group.command("decommission", epilog="Example: dlog bookie decommission bookie-3 --yes")
@click.argument("name")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for auto-recovery.",
)
@confirmed
@common_options
def decommission(name: str, timeout_s: float, *, yes: bool) -> None:
    """Move what the stopped bookie NAME holds to other bookies.

    Auto-recovery does the work.  When no ledger needs the bookie any more, its cookie is deleted.
    While there are too few other bookies, the command says so and waits for another one.  An
    interrupted decommission may be started again.
    """
    from dlcore.ops.autorecovery.maintenance import Maintenance

    require_consent(yes=yes)
    held = run_direct(lambda namespace: _count_ledgers_of(namespace, name), is_long=True)
    ask(
        f"Give up bookie {name} for good, with all that its disk holds of {held} ledgers; others "
        "take them over first",
        yes=yes,
    )

    async def move(namespace: DirectNamespace) -> int:
        progress = Progress()
        return await Maintenance(namespace.ports).decommission(
            name, timeout_s=timeout_s, report=progress.say, warn=progress.warn
        )

    moved = run_direct(telling_time("waiting for auto-recovery", move), is_long=True)
    show_done(
        f"decommissioned {name}: {moved} ledgers moved", {"bookie": name, "ledgers_moved": moved}
    )


@bookie_group.command("collect", epilog="Example: dlog bookie collect bookie-3 --yes")
@click.argument("name")
@confirmed
@common_options
def collect(name: str, *, yes: bool) -> None:
    """Let the bookie NAME collect what its brake holds back.

    If most ledgers of a bookie look deleted at once, it keeps them for a day, because their
    metadata may have been lost by accident.  Its log says so.  This command lets its next passes
    delete them, once.
    """
    from dlcore.ops.autorecovery.maintenance import Maintenance

    require_consent(yes=yes)
    going = run_direct(lambda namespace: _describe_garbage(namespace, name), is_long=True)
    ask(f"Drop what bookie {name} holds of ledgers without metadata: {going}", yes=yes)

    async def release(namespace: DirectNamespace) -> None:
        await Maintenance(namespace.ports).release_garbage(name)

    run_direct(release)
    show_done(f"bookie {name} will collect what was held back", {"bookie": name})


async def _describe_garbage(namespace: DirectNamespace, name: str) -> str:
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.wire.control import ControlClient

    needed = await _count_ledgers_of(namespace, name)
    control = ControlClient(timeout_s=_INFO_TIMEOUT_S, tls=TlsInUse.of(namespace_tls()))
    try:
        for info in await namespace.get_bookies():
            if info.bookie.name == name:
                answer = await control.ask(info.bookie, info.control_address)
                return f"it holds {answer.ledgers} ledgers, and {needed} refer to it"
    except BookieUnavailableError as error:
        return f"how much is unknown ({error}), {needed} ledgers refer to it"
    finally:
        await control.aclose()
    return f"how much is unknown, for it is not registered; {needed} ledgers refer to it"


@bookie_group.command("read-only", epilog="Example: dlog bookie read-only bookie-3")
@click.argument("name")
@click.option("--off", is_flag=True, help="Allow new ledgers on the bookie again.")
@common_options
def set_read_only(name: str, *, off: bool) -> None:
    """Keep the bookie NAME from getting new ledgers, until --off.

    This holds over restarts.  Writes to its existing ledgers continue until their segments end, and
    it serves all its entries.  A bookie with a full disk is read-only in any case.
    """

    async def hold(namespace: DirectNamespace) -> bool:
        from dlcore.ops.autorecovery.maintenance import Maintenance

        await Maintenance(namespace.ports).hold_read_only(name, is_held=not off)
        times_absent = 0
        for _ in range(_REGISTRATION_POLLS):
            states = [b.read_only for b in await namespace.get_bookies() if b.bookie.name == name]
            if states == [not off]:
                return True
            times_absent = 0 if states else times_absent + 1
            if times_absent == _ABSENT_POLLS:
                break
            await asyncio.sleep(_REGISTRATION_POLL_S)
        return False

    is_registered = run_direct(hold)
    state = "writable" if off else "read-only"
    when = "" if is_registered else ", once it is registered and its disk allows it"
    show_done(
        f"bookie {name} is {state}{when}",
        {"bookie": name, "read_only": not off, "registered": is_registered},
    )


async def _count_ledgers_of(namespace: DirectNamespace, name: str) -> int:
    from dlcore.ops.autorecovery.maintenance import Maintenance

    with Progress() as progress:
        maintenance = Maintenance(namespace.ports)
        report = partial(progress.tell, "ledgers looked at")
        return len(await maintenance.ledgers_of(name, report=report))


@bookie_group.group("cookie")
@common_options
def cookie_group() -> None:
    """Show the cookies of bookies' disks, and delete one.

    By its cookie the cluster knows a disk.
    """


@cookie_group.command("list", epilog="Example: dlog bookie cookie list")
@lists_names
@common_options
def list_cookies() -> None:
    """List the cookies: each bookie that the cluster knows.

    It may be registered or not.
    """

    async def read(namespace: DirectNamespace) -> list[dict[str, object]]:
        from dlcore.ops.autorecovery.replicas import read_cookies

        cookies = await read_cookies(namespace.ports)
        registered = {info.bookie for info in await namespace.get_bookies()}
        return [_cookie_row(cookie, cookie.bookie in registered) for cookie in cookies]

    show_rows(
        run_direct(read),
        columns=("name", "incarnation", "created", "registered"),
        empty="no bookie has a cookie",
    )


def _cookie_row(cookie: BookieCookie, is_registered: bool) -> dict[str, object]:
    return {
        "name": cookie.name,
        "incarnation": cookie.incarnation,
        "created": time_text(cookie.created_ms),
        "registered": is_registered,
    }


@cookie_group.command("delete", epilog="Example: dlog bookie cookie delete bookie-3 --yes")
@click.argument("name")
@confirmed
@common_options
def delete_cookie(name: str, *, yes: bool) -> None:
    """Forget the disk of the stopped bookie NAME, if the disk is lost.

    After this, the bookie can start on an empty disk as a new one with its old name, and
    auto-recovery restores the copies of the lost disk elsewhere.  If the disk is not lost, start
    the bookie on it.  To move its data away first, decommission it.
    """
    require_consent(yes=yes)
    held = run_direct(lambda namespace: _count_ledgers_of(namespace, name), is_long=True)
    ask(
        f"Forget the disk of bookie {name}, which {held} ledgers refer to: if it is not lost, what "
        "it holds can not be used any more",
        yes=yes,
    )

    async def delete(namespace: DirectNamespace) -> str:
        from dlcore.ops.autorecovery.maintenance import Maintenance

        return await Maintenance(namespace.ports).delete_cookie(name)

    incarnation = run_direct(delete)
    show_done(
        f"deleted the cookie of bookie {name}, incarnation {incarnation}; {held} ledgers get other "
        "replicas",
        {"bookie": name, "incarnation": incarnation, "ledgers": held},
    )
