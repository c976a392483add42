"""The identity of a bookie: its cookie, in its folder and in the cluster.

The cookie binds a data folder to a name, an incarnation and a cluster.  It is stored in the folder
and in the metadata store, and states that the folder holds all data of this identity.  A bookie
starts only if both cookies agree, or if both are missing and the folder is empty: then it creates
them.  The folder gets a provisional cookie first, so that the next start can finish an interrupted
first start.

Each start is a life.  It is counted in the folder's cookie, and then in the cluster's.  A folder
that was copied before the last start is recognized by its older life.  If another copy began the
same life, it is recognized by the name of that start.  Data that was acknowledged since is missing
in such a folder, and the bookie would prove that it never existed.  Therefore such a folder is
refused, and so is a folder if another process answers as this bookie.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from msgspec.structs import replace

from bookie.disks.port import DiskFullError, write_with_room
from bookie.files.format import file_number
from dlcore.base.errors import (
    ConfigurationError,
    MetadataConnectionError,
    NodeExistsError,
)
from dlcore.ledger.metadata.values import BookieCookie, BookieRegistration
from dlcore.metadata.one_node import change_node
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie.disks.port import Disk
    from dlcore.base.clock import Clock
    from dlcore.base.ids import BookieId
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Versioned

logger = logging.getLogger(__name__)

COOKIE_FILE = "cookie"
_PROVISIONAL_FILE = "cookie.new"
_RETRY_S = 0.5


async def establish_identity(
    disk: Disk,
    store: MetadataStore,
    paths: NamespacePaths,
    *,
    name: str,
    cluster_id: str,
    clock: Clock,
    is_answered: Callable[[str], Awaitable[bool]] | None = None,
    patience_s: float = 0.0,
) -> BookieCookie:
    """Return the identity in the data folder, after checking it against the cluster.

    `is_answered` returns whether a process accepts connections at an address.  The process at the
    registered address may be another one than the bookie's.  Therefore an old registration gets
    `patience_s` to vanish with its session.

    Raises:
        ConfigurationError: folder and cluster contradict each other; the message says how, and what
            to do.
    """
    node = paths.cookie(name)
    remote = await _read_remote_cookie(store, node)
    local = await _read_cookie(disk, COOKIE_FILE)
    if local is not None:
        _check_folder(local, name=name, cluster_id=cluster_id)
        _check_remote(local, remote, node)
        if not any(file_number(each) is not None for each in disk.names()):
            raise ConfigurationError(
                f"the data folder holds the cookie of bookie {name!r} but no data: its files were "
                "deleted; restore them, or start the bookie as a new one: empty the folder, and "
                f"dlog bookie cookie delete {name}"
            )
        if is_answered is not None:
            await _wait_alone(
                store, paths, local.bookie, is_answered=is_answered, patience_s=patience_s
            )
        return local
    provisional = await _read_cookie(disk, _PROVISIONAL_FILE)
    if provisional is None:
        _check_empty(disk, remote, name=name)
        provisional = BookieCookie(
            name=name,
            incarnation=clock.new_token(),
            cluster_id=cluster_id,
            created_ms=clock.now_ms(),
        )
        # Before the cluster's cookie: otherwise a crash would leave a cookie that no folder can
        # show.
        await disk.write_file(_PROVISIONAL_FILE, encode(provisional))
    _check_folder(provisional, name=name, cluster_id=cluster_id)
    if remote is None:
        remote = await _create_remote_cookie(store, node, provisional)
    _check_remote(provisional, remote, node)
    return provisional


async def begin_life(
    disk: Disk, store: MetadataStore, paths: NamespacePaths, cookie: BookieCookie, *, clock: Clock
) -> None:
    """Count this start in the folder, then in the cluster; nothing may be served before.

    It also finishes a first start, since the folder holds data now.  A cookie without data would
    count as a loss.

    Raises:
        ConfigurationError: another copy of the folder was started meanwhile.
        MetadataError: the store failed.
    """
    if await disk.read_file(COOKIE_FILE) is None:
        logger.info("new bookie name=%s incarnation=%s", cookie.name, cookie.incarnation)
    begun = replace(cookie, life=cookie.life + 1, start=clock.new_token())
    # The folder first: a crash between the two leaves it one life ahead, which the next start
    # accepts. In the other order the folder would look like an older copy.
    await _write_cookie(disk, encode(begun))
    await disk.delete([_PROVISIONAL_FILE])
    node = paths.cookie(cookie.name)

    def change(found: Versioned | None) -> tuple[None, bytes | None]:
        remote = None if found is None else decode(BookieCookie, found.value, source=node)
        if remote == begun:
            return None, None  # the reply of an earlier attempt was lost
        _check_remote(begun, remote, node)
        return None, encode(begun)

    await change_node(store, node, change)


async def _write_cookie(disk: Disk, data: bytes) -> None:
    """Replace the folder's cookie; on a full disk take held-back space, and hold it back again."""
    held_bytes = disk.held_bytes
    await write_with_room(disk, len(data), lambda: disk.write_file(COOKIE_FILE, data))
    if disk.held_bytes < held_bytes:
        # The space of the old cookie is free again.  Without this, many starts on a full disk would
        # use up the space that is held back.
        with contextlib.suppress(DiskFullError):
            await disk.hold(min(held_bytes, disk.space().free_bytes))


async def _wait_alone(
    store: MetadataStore,
    paths: NamespacePaths,
    bookie: BookieId,
    *,
    is_answered: Callable[[str], Awaitable[bool]],
    patience_s: float,
) -> None:
    """Raise if a live process is registered as this bookie: that one has the newest data."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + patience_s
    while True:
        try:
            return await _require_alone(store, paths, bookie, is_answered)
        except ConfigurationError as error:
            if loop.time() >= deadline_s:
                raise
            logger.warning(
                "not started yet: %s; to do: stop the other process of this name, or wait until "
                "its session ends",
                error,
            )
        # An old registration vanishes with its session, and then there is no conflict.
        await asyncio.sleep(_RETRY_S)


async def _require_alone(
    store: MetadataStore,
    paths: NamespacePaths,
    bookie: BookieId,
    is_answered: Callable[[str], Awaitable[bool]],
) -> None:
    for path in (paths.bookie_available(bookie.name), paths.bookie_readonly(bookie.name)):
        node = await store.get(path, fresh=True)
        if node is None:
            continue
        other = decode(BookieRegistration, node.value, source=path)
        if other.bookie == bookie and await is_answered(other.address):
            raise ConfigurationError(
                f"bookie {bookie} runs already, at {other.address}: this data folder is a copy of "
                "its folder; stop that process first if its folder is to be given up"
            )


def _check_empty(disk: Disk, remote: BookieCookie | None, *, name: str) -> None:
    strangers = [each for each in disk.names() if each not in (COOKIE_FILE, _PROVISIONAL_FILE)]
    if strangers:
        raise ConfigurationError(
            f"the data folder holds no cookie but other files ({', '.join(strangers[:3])}): "
            f"give bookie {name!r} its own folder, or an empty one if it is new"
        )
    if remote is not None:
        raise ConfigurationError(
            f"the data folder is empty, but the cluster knows bookie {name!r}, incarnation "
            f"{remote.incarnation}: mount the disk with its data; if that is lost for good, dlog "
            f"bookie cookie delete {name} lets the bookie start as a new and empty one"
        )


def _check_folder(cookie: BookieCookie, *, name: str, cluster_id: str) -> None:
    if cookie.name != name:
        raise ConfigurationError(
            f"the data folder belongs to bookie {cookie.name!r}, not to {name!r}: "
            f"start {name!r} on its own folder"
        )
    if cookie.cluster_id != cluster_id:
        raise ConfigurationError(
            f"the data folder belongs to cluster {cookie.cluster_id}, but the namespace is "
            f"{cluster_id}: check metadata_uri, or whether ZooKeeper lost its data"
        )


def _check_remote(local: BookieCookie, remote: BookieCookie | None, node: str) -> None:
    if remote is None:
        raise ConfigurationError(
            f"the data folder belongs to bookie {local.name!r}, incarnation {local.incarnation}, "
            f"but the cluster has no cookie {node}: it was decommissioned, or ZooKeeper lost its "
            "data; to start it as a new and empty bookie, move the folder's content away"
        )
    # Life and start are compared below, because they may differ in one direction.
    if replace(remote, life=local.life, start=local.start) != local:
        raise ConfigurationError(
            f"the data folder holds incarnation {local.incarnation} of bookie {local.name!r}, but "
            f"the cluster knows incarnation {remote.incarnation} (cookie {node}): another folder "
            "holds this bookie's data; start it there"
        )
    if remote.life > local.life or (
        # Empty before the first start.
        remote.life == local.life and remote.start not in ("", local.start)
    ):
        raise ConfigurationError(
            f"the data folder is an older copy of bookie {local.name!r}: it was last started as "
            f"life {local.life}, the cluster knows life {remote.life} (cookie {node}); it lacks "
            "later acknowledged entries.  Start the bookie on its newest folder; if that is "
            f"lost, empty this one, and dlog bookie cookie delete {local.name} lets the bookie "
            "start as a new one"
        )
    if local.life > remote.life and local.start == remote.start != "":
        # Each start has a unique name.
        raise ConfigurationError(
            f"the cookie in the data folder of bookie {local.name!r} is damaged: it counts start "
            f"{local.start} as life {local.life}, the cluster counts it as life {remote.life} "
            f"(cookie {node}); set the folder's life to that number"
        )


async def _create_remote_cookie(
    store: MetadataStore, node: str, cookie: BookieCookie
) -> BookieCookie:
    """Create the cluster's cookie; return the cookie that is stored in the end."""
    try:
        await store.create(node, encode(cookie))
    except (NodeExistsError, MetadataConnectionError):
        # Another start was faster, or the reply to our own create was lost: the stored cookie
        # decides.
        found = await _read_remote_cookie(store, node)
        if found is None:
            raise
        return found
    return cookie


async def _read_cookie(disk: Disk, file: str) -> BookieCookie | None:
    data = await disk.read_file(file)
    return (
        None
        if data is None
        else decode(BookieCookie, data, source=f"file {file} of the data folder")
    )


async def _read_remote_cookie(store: MetadataStore, node: str) -> BookieCookie | None:
    found = await store.get(node, fresh=True)
    return None if found is None else decode(BookieCookie, found.value, source=node)
