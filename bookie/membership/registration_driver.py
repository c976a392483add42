"""Keeps a bookie registered: runs a `Registration` over the metadata store."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, assert_never

from bookie.membership.registration import (
    Applied,
    Apply,
    Call,
    CallFailed,
    Conflict,
    CookieLooked,
    Effect,
    Event,
    Looked,
    Register,
    RegisterEnded,
    Registration,
    RemovalEnded,
    RetryLater,
    SetReadOnly,
    SetSpace,
    Signal,
)
from dlcore.base.background import BackgroundTasks, answer, refuse
from dlcore.base.config import DEFAULT_RACK
from dlcore.base.errors import DLError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie.disks.port import DiskSpace
    from dlcore.base.ids import BookieId
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, SessionState, Unsubscribe

logger = logging.getLogger(__name__)

_UNREGISTER_TIMEOUT_S = 3.0
"""A stop waits no longer for the store: the nodes end with the session anyway."""


class Registrar:
    """Keeps one bookie registered.

    Args:
        store: the session that owns the ephemeral nodes.
        rack: the bookie's failure domain.
        on_conflict: called once if another process took over this bookie's registration, if the
            bookie was decommissioned, or if a defect ended the registration.
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
        self._held = paths.bookie_held(bookie.name)
        self._on_conflict = on_conflict
        self._machine = Registration(
            paths, bookie=bookie, address=address, control_address=control_address, rack=rack
        )
        self._asked: asyncio.Future[None] | None = None  # the caller of `register` or `aclose`
        self._unsubscribe: list[Unsubscribe] = []
        self._tasks = BackgroundTasks(self._on_defect)

    async def register(self, *, is_read_only: bool, patience_s: float) -> None:
        """Register for the first time, and keep the registration from then on.

        The node of another incarnation gets `patience_s` to vanish with its session.

        Raises:
            ConfigurationError: the name belongs to another bookie, or was decommissioned.
            MetadataError: the store failed for so long.
        """
        loop = asyncio.get_running_loop()
        self._asked = loop.create_future()
        self._handle(Register(is_read_only, loop.time() + patience_s))
        try:
            await self._asked
        except asyncio.CancelledError:
            await self.aclose()
            raise

    def set_read_only(self, *, is_read_only: bool) -> None:
        """Schedule a move of the registration to the writable or the read-only bookies."""
        self._handle(SetReadOnly(is_read_only))

    def set_space(self, space: DiskSpace) -> None:
        """Schedule an update of the registered disk space.

        Each call that changes it is a write to the metadata store: call it seldom.
        """
        self._handle(SetSpace(space))

    async def aclose(self) -> None:
        """Remove the registration.  Idempotent."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe = []
        await self._tasks.aclose()
        self._asked = asyncio.get_running_loop().create_future()
        self._handle(Signal.CLOSE)
        if self._tasks:
            await asyncio.wait([self._asked], timeout=_UNREGISTER_TIMEOUT_S)
            await self._tasks.aclose()

    def _handle(self, event: Event) -> None:
        for effect in self._machine.handle(event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Call() | Apply():
                self._tasks.start(self._call(effect), name="bookie-registrar")
            case RetryLater(after_s, error):
                logger.warning(
                    "registration of bookie=%s could not be read or changed: %s; to do: see that "
                    "ZooKeeper answers; dlog tries again; if the node is gone, no client uses the "
                    "bookie until then",
                    self._machine.announced.bookie,
                    error,
                )
                self._tasks.start(self._retry(after_s))
            case RegisterEnded(None):
                logger.info("registered bookie=%s", self._machine.announced.bookie)
                self._watch()
                self._answer(None)
            case RegisterEnded(error):
                self._answer(error)
            case Conflict(error):
                self._on_conflict(error)
            case RemovalEnded(error):
                if error is not None:
                    logger.warning(
                        "not unregistered bookie=%s: %s; to do: nothing, the entry goes with its "
                        "session",
                        self._machine.announced.bookie,
                        error,
                    )
                self._answer(None)
            case _:
                assert_never(effect)

    def _answer(self, error: DLError | None) -> None:
        assert self._asked is not None
        answer(self._asked, error)

    def _watch(self) -> None:
        machine = self._machine
        self._unsubscribe = [
            self._store.watch(path, self._may_differ)
            for path in (machine.nodes.available, machine.nodes.readonly, self._held)
        ]
        self._unsubscribe.append(self._store.on_session(self._on_session))

    def _may_differ(self) -> None:
        self._handle(Signal.MAY_DIFFER)

    def _on_session(self, state: SessionState) -> None:
        logger.info(
            "metadata session state=%s bookie=%s", state.value, self._machine.announced.bookie
        )
        self._may_differ()

    async def _retry(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._handle(Signal.RETRY_DUE)

    async def _call(self, call: Call | Apply) -> None:
        try:
            event: Event = await self._answer_of(call)
        except DLError as error:
            event = CallFailed(error, asyncio.get_running_loop().time())
        self._handle(event)

    async def _answer_of(self, call: Call | Apply) -> Event:
        store, machine, loop = self._store, self._machine, asyncio.get_running_loop()
        match call:
            case Call.LOOK:
                # Before the nodes: if the session changes meanwhile, the next look finds this one
                # outdated.
                session = store.session_token
                is_held = await store.get(self._held) is not None
                paths = (machine.nodes.available, machine.nodes.readonly)
                found = {path: await store.get(path) for path in paths}
                nodes = {path: node for path, node in found.items() if node is not None}
                return Looked(session, is_held, nodes, loop.time())
            case Call.LOOK_FOR_COOKIE:
                is_missing = await store.get(machine.nodes.cookie, fresh=True) is None
                cookies = machine.nodes.cookie.rpartition("/")[0]
                # Without any cookie the store has lost its data, and proves no decommission.
                has_others = is_missing and bool(await store.get_children(cookies))
                return CookieLooked(has_others, loop.time())
            case Apply(ops):
                await store.multi(ops)
                return Applied()
            case _:
                assert_never(call)

    def _on_defect(self, error: BaseException) -> None:
        # No task keeps the bookie registered now: neither a caller nor the bookie must wait for it.
        if self._asked is not None:
            refuse(self._asked, error)
        self._on_conflict(DLError(f"a defect ended the registration: {error!r}"))
