"""The bookies that are registered, and their addresses."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.background import BackgroundTasks, outcome_of, reported_to_callers, together
from dlcore.base.errors import (
    BookieUnavailableError,
    DLError,
    MetadataConnectionError,
    MetadataSessionExpiredError,
    WrongIncarnationError,
)
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.metadata.stored import decode, decode_or_tell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.base.config import QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Unsubscribe


logger = logging.getLogger(__name__)


class BookieRegistry:
    """The registrations of one namespace's bookies.

    Registration is for discovery only: safety does not depend on it.  Addresses are cached until
    the list of bookies changes.  While the metadata store is away, an old address is used.
    """

    def __init__(self, store: MetadataStore, paths: NamespacePaths) -> None:
        self._store = store
        self._paths = paths
        self._known: dict[BookieId, BookieRegistration] = {}
        self._fresh: set[BookieId] = set()  # bookies read since the list last changed
        self._changes = 0
        self._changed = asyncio.Event()  # replaced by a new one at each change
        self._all: dict[BookieId, str] | None = None  # None: the list has changed since it was read
        self._reading: asyncio.Task[dict[BookieId, str]] | None = None
        self._reads = BackgroundTasks(reported_to_callers)  # a caller may leave while one runs
        self._unsubscribes: list[Unsubscribe] = []

    async def get_bookies(self) -> list[BookieRegistration]:
        """Read all registered bookies afresh, ordered by name.

        A bookie that is changing between writable and read-only counts as read-only.  If the
        registration of a bookie cannot be read, the bookie is left out with a warning.
        """
        directories = (self._paths.bookies_available, self._paths.bookies_readonly)
        writable, readonly = await together(*map(self._read_directory, directories))
        found = {each.bookie: each for each in (*writable, *readonly)}
        return [found[bookie] for bookie in sorted(found)]

    @property
    def known_addresses(self) -> Mapping[BookieId, str] | None:
        """The last result of `get_addresses`; None if the list of bookies has changed since."""
        return self._all

    async def get_addresses(self) -> Mapping[BookieId, str]:
        """Return the addresses of all registered bookies; read again after the list changed."""
        if self._all is None:
            self._watch()
            if self._reading is None:
                self._reading = self._reads.start(self._read_all(), name="bookie-addresses")
            return await outcome_of(self._reading)
        return self._all

    async def warn_of_few(self, what: str, quorum: QuorumConfig) -> None:
        """Log a warning if fewer bookies are registered than `what` needs; it is no error.

        More bookies may register later.  Read-only ones count: they mostly become writable again.
        """
        try:
            count = len(await self.get_addresses())
        except DLError as error:
            logger.info("cannot count the registered bookies: %s", error)
            return
        if count < quorum.ensemble_size:
            logger.warning(
                "%s needs %d bookies (E/Qw/Qa %s), but %d are registered: start more before the "
                "first write; to do: dlog bookie run on further hosts",
                what,
                quorum.ensemble_size,
                quorum,
                count,
            )

    async def _read_all(self) -> dict[BookieId, str]:
        changes = self._changes
        try:
            found = {info.bookie: info.address for info in await self.get_bookies()}
        finally:
            self._reading = None
        if changes == self._changes:  # else the list changed during the read
            self._all = found
        return found

    async def resolve(self, bookie: BookieId) -> str:
        """Return the address (``host:port``) of `bookie`; see `_registration` for errors."""
        return (await self._registration(bookie)).address

    async def resolve_control(self, bookie: BookieId) -> str:
        """Return the address of the control service of `bookie`; see `_registration` for errors."""
        return (await self._registration(bookie)).control_address

    async def _registration(self, bookie: BookieId) -> BookieRegistration:
        """Return the registration of `bookie`.

        Raises:
            BookieUnavailableError: it is not registered, or the metadata store gave no answer.
            WrongIncarnationError: another incarnation is registered under its name.
            CorruptMetadataError: its registration cannot be read.
        """
        if bookie in self._fresh:
            return self._known[bookie]
        self._watch()
        changes = self._changes
        try:
            registration = await self._look_up(bookie)
        except (MetadataConnectionError, MetadataSessionExpiredError) as error:
            if bookie in self._known:
                return self._known[bookie]
            raise BookieUnavailableError(
                f"the address of bookie {bookie} is unknown: no answer from the metadata store"
            ) from error
        self._known[bookie] = registration
        if changes == self._changes:  # else the list changed during the read
            self._fresh.add(bookie)
        return registration

    async def aclose(self) -> None:
        """Stop watching the list of bookies.  Idempotent."""
        while self._unsubscribes:
            self._unsubscribes.pop()()
        await self._reads.aclose()

    async def _look_up(self, bookie: BookieId) -> BookieRegistration:
        paths = (
            self._paths.bookie_available(bookie.name),
            self._paths.bookie_readonly(bookie.name),
        )
        registrations = [
            each for each in await together(*map(self._read, paths)) if each is not None
        ]
        for registration in registrations:
            if registration.bookie == bookie:
                return registration
        if registrations:
            raise WrongIncarnationError(
                f"bookie {bookie} is gone: {registrations[0].bookie} is registered under its name"
            )
        raise BookieUnavailableError(f"bookie {bookie} is not registered")

    async def _read_directory(self, path: str) -> list[BookieRegistration]:
        names = await self._store.get_children(path, fresh=True) or ()
        paths = [f"{path}/{name}" for name in names]
        tell = partial(logger.warning, "bookie left out, its registration cannot be read: %s")
        registrations = (
            decode_or_tell(BookieRegistration, node, source=each, tell=tell)
            for each, node in zip(paths, await self._store.get_many(paths), strict=True)
        )
        return list(filter(None, registrations))

    async def _read(self, path: str) -> BookieRegistration | None:
        node = await self._store.get(path)
        return None if node is None else decode(BookieRegistration, node.value, source=path)

    def _watch(self) -> None:
        if not self._unsubscribes:
            for path in (self._paths.bookies_available, self._paths.bookies_readonly):
                self._unsubscribes.append(self._store.watch(path, self._on_change))

    def watch_changes(self) -> asyncio.Event:
        """Return an event that is set once the list of bookies may differ from now."""
        self._watch()
        return self._changed

    def _on_change(self) -> None:
        self._changes += 1
        self._changed.set()
        self._changed = asyncio.Event()
        self._all = None
        self._fresh.clear()
