"""The identity of a bookie: its cookie and its registration.

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

The registration is an ephemeral node with the address, the rack and the disk's space.  It serves
discovery only; safety never depends on it.  `Registrar` keeps it correct through lost sessions and
changes between writable and read-only.  A change of space overwrites the node, so that the bookie
stays registered meanwhile.  A bookie whose cookie was deleted is not registered again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from msgspec.structs import replace

from bookie.disks.port import DiskFullError, DiskSpace, write_with_room
from bookie.files.format import file_number
from dlcore.base.background import BackgroundTasks
from dlcore.base.config import DEFAULT_RACK
from dlcore.base.errors import (
    ConfigurationError,
    DLError,
    MetadataConnectionError,
    MetadataError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.ledger.metadata.bookies import BookieCookie, BookieRegistration
from dlcore.metadata.port import ANY_VERSION, Check, Create, Delete, Op, SessionState
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie.disks.port import Disk
    from dlcore.base.clock import Clock
    from dlcore.base.ids import BookieId
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Unsubscribe, Versioned

logger = logging.getLogger(__name__)

COOKIE_FILE = "cookie"
_PROVISIONAL_FILE = "cookie.new"
_RETRY_S = 0.5
_ATTEMPTS_MAX = 5
_UNREGISTER_TIMEOUT_S = 3.0


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
    await _write_cookie(disk, encode(begun))
    await disk.delete([_PROVISIONAL_FILE])
    node = paths.cookie(cookie.name)
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        found = await store.get(node, fresh=True)
        remote = None if found is None else decode(BookieCookie, found.value, source=node)
        if remote == begun:
            return  # the reply of an earlier attempt was lost
        _check_remote(begun, remote, node)
        assert found is not None
        try:
            await store.put(node, encode(begun), version=found.version)
        except (MetadataVersionError, NoNodeError, MetadataConnectionError):
            if attempt == _ATTEMPTS_MAX:
                raise
        else:
            return


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
            logger.warning("not started yet: %s", error)
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
    if replace(remote, life=local.life, start=local.start) != local:
        raise ConfigurationError(
            f"the data folder holds incarnation {local.incarnation} of bookie {local.name!r}, but "
            f"the cluster knows incarnation {remote.incarnation} (cookie {node}): another folder "
            "holds this bookie's data; start it there"
        )
    if remote.life > local.life or (
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


class Registrar:
    """Keeps one bookie registered.

    Args:
        store: the session that owns the ephemeral nodes.
        rack: the bookie's failure domain.
        on_conflict: called once if another process took over this bookie's registration, or if the
            bookie was decommissioned.
    """

    def __init__(
        self,
        store: MetadataStore,
        paths: NamespacePaths,
        *,
        bookie: BookieId,
        address: str,
        control_address: str,
        rack: str = DEFAULT_RACK,
        on_conflict: Callable[[DLError], None],
    ) -> None:
        self._store = store
        self._bookie = bookie
        self._address = address
        self._control_address = control_address
        self._rack = rack
        self._space = DiskSpace(free_bytes=0, total_bytes=0)
        self._on_conflict = on_conflict
        self._available = paths.bookie_available(bookie.name)
        self._readonly = paths.bookie_readonly(bookie.name)
        self._cookie = paths.cookie(bookie.name)
        self._held = paths.bookie_held(bookie.name)
        self._is_read_only = False
        self._session_token: str | None = None  # of the session that created the node
        self._may_differ = asyncio.Event()
        self._unsubscribe: list[Unsubscribe] = []
        self._tasks = BackgroundTasks(self._on_defect)
        self._is_registered = False

    async def register(self, *, is_read_only: bool, patience_s: float) -> None:
        """Register for the first time, and keep the registration from then on.

        The node of another incarnation gets `patience_s` to vanish with its session.
        """
        self._is_read_only = is_read_only
        await self._register_within(patience_s)
        self._unsubscribe = [
            self._store.watch(self._available, self._may_differ.set),
            self._store.watch(self._readonly, self._may_differ.set),
            self._store.watch(self._held, self._may_differ.set),
            self._store.on_session(self._on_session),
        ]
        self._is_registered = True
        self._tasks.start(self._maintain(), name="bookie-registrar")

    async def _register_within(self, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + patience_s
        while True:
            try:
                return await self._reconcile()
            except (MetadataError, ConfigurationError) as error:
                if loop.time() >= deadline_s:
                    raise
                logger.warning("not yet registered bookie=%s: %s", self._bookie, error)
            await asyncio.sleep(_RETRY_S)

    def set_read_only(self, *, is_read_only: bool) -> None:
        """Schedule a move of the registration to the writable or the read-only bookies."""
        self._is_read_only = is_read_only
        self._may_differ.set()

    def set_space(self, space: DiskSpace) -> None:
        """Schedule an update of the registered disk space.

        Each call that changes it is a write to the metadata store: call it seldom.
        """
        self._space = space
        self._may_differ.set()

    async def aclose(self) -> None:
        """Remove the registration."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        await self._tasks.aclose()
        if self._is_registered:
            self._is_registered = False
            await self._unregister()

    def _on_defect(self, error: BaseException) -> None:
        self._on_conflict(DLError(f"a defect ended the registration: {error!r}"))

    def _on_session(self, state: SessionState) -> None:
        logger.info("metadata session state=%s bookie=%s", state.value, self._bookie)
        self._may_differ.set()

    async def _maintain(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._may_differ.wait()
            self._may_differ.clear()
            try:
                await self._reconcile()
            except MetadataError as error:
                logger.warning("registration failed bookie=%s: %s", self._bookie, error)
                loop.call_later(_RETRY_S, self._may_differ.set)
            except ConfigurationError as error:
                self._on_conflict(error)
                return

    async def _reconcile(self) -> None:
        """Bring the nodes into the wanted state."""
        session_token = self._store.session_token
        # A bookie that an operator holds gets no new ledgers; its storage still accepts adds.
        is_held = await self._store.get(self._held) is not None
        is_read_only = self._is_read_only or is_held
        wanted = self._readonly if is_read_only else self._available
        registration = BookieRegistration(
            name=self._bookie.name,
            incarnation=self._bookie.incarnation,
            address=self._address,
            read_only=is_read_only,
            rack=self._rack,
            free_bytes=self._space.free_bytes,
            total_bytes=self._space.total_bytes,
            session=session_token,
            control_address=self._control_address,
        )
        value = encode(registration)
        found: dict[str, Versioned] = {}
        for path in (self._available, self._readonly):
            node = await self._store.get(path)
            if node is not None:
                self._check_own(path, node)
                found[path] = node
        if session_token == self._session_token and found.keys() == {wanted}:
            node = found[wanted]
            if node.value == value:
                return
            if decode(BookieRegistration, node.value, source=wanted).session == session_token:
                # A node of our session may be overwritten; the node of another session would
                # vanish.
                await self._store.put(wanted, value, version=node.version)
                return
        ops: list[Op] = [Check(self._cookie, ANY_VERSION)]
        ops += [Delete(path, node.version) for path, node in found.items()]
        try:
            await self._store.multi([*ops, Create(wanted, value, ephemeral=True)])
        except NoNodeError:
            await self._check_cookie()
            raise
        self._session_token = session_token
        logger.info(
            "registered bookie=%s address=%s rack=%s read_only=%s",
            self._bookie,
            self._address,
            self._rack,
            is_read_only,
        )

    async def _check_cookie(self) -> None:
        is_missing = await self._store.get(self._cookie, fresh=True) is None
        # A store without any cookie has lost its data: wait until it is restored.
        if is_missing and await self._store.get_children(self._cookie.rpartition("/")[0]):
            # The next start would be refused, and entries added now would be lost.
            raise ConfigurationError(
                f"bookie {self._bookie} has no cookie {self._cookie} in the cluster: it was "
                "decommissioned, or ZooKeeper lost its data; to start it as a new and empty "
                "bookie, move the content of its folder away"
            )

    def _check_own(self, path: str, node: Versioned) -> None:
        """Accept only nodes of this incarnation, and of this session only our own."""
        other = decode(BookieRegistration, node.value, source=path)
        if other.incarnation != self._bookie.incarnation:
            raise ConfigurationError(
                f"bookie {self._bookie.name!r} is registered as incarnation {other.incarnation} at "
                f"{other.address}, this is {self._bookie.incarnation}: stop one of the two"
            )
        if self._session_token == self._store.session_token and other.address != self._address:
            raise ConfigurationError(
                f"bookie {self._bookie} at {self._address} was registered by another process at "
                f"{other.address}: it runs on a copy of this data folder; stop one of the two"
            )

    async def _unregister(self) -> None:
        try:
            async with asyncio.timeout(_UNREGISTER_TIMEOUT_S):
                for path in (self._available, self._readonly):
                    node = await self._store.get(path)
                    if node is not None:
                        self._check_own(path, node)
                        await self._store.delete(path, version=node.version)
        except (MetadataError, ConfigurationError, TimeoutError) as error:
            # The node is removed with the session in any case.
            logger.warning("not unregistered bookie=%s: %s", self._bookie, error)
