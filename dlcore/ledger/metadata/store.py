"""Ledger metadata in the metadata store: ids, compare-and-set, and lost replies.

After a write whose reply was lost the node is read back.  The creation token, or the value and the
version, show whether the write was applied.  It is sent again only if it was not applied.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from dlcore.base.background import all_of, together
from dlcore.base.errors import (
    CorruptMetadataError,
    LedgerExistsError,
    LedgerNotFoundError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.ledger.metadata.values import LedgerMetadata
from dlcore.metadata.paths import is_number
from dlcore.metadata.port import (
    ANY_VERSION,
    Create,
    MetadataStore,
    Op,
    Put,
    Unsubscribe,
    Versioned,
)
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from dlcore.metadata.paths import NamespacePaths

logger = logging.getLogger(__name__)

_ATTEMPTS_MAX = 5
"""Lost replies to one write after which the caller gets the error: the outcome is unknown."""
_IDS_AT_ONCE = 16
"""Ids are taken in ranges, so that most new ledgers need no round trip for an id."""
_READ_AT_ONCE = 100
"""Nodes of one request: a node may name the bookies of many ensembles and hold users' metadata."""
_ID_DIGITS_MAX = 19
"""Digits of the largest number that can be stored, 2**63 - 1."""
_ID_CONFLICTS_MAX = 10_000
"""Each conflict means that another client got an id; more conflicts than this are a fault."""


ReadLedgers: TypeAlias = dict[int, LedgerMetadata | CorruptMetadataError]
"""Ledger metadata by id, in the order of the request; the error if the metadata is damaged."""


@dataclass(frozen=True, slots=True)
class VersionedLedger:
    """A ledger's metadata and the version for a compare-and-set of it."""

    metadata: LedgerMetadata
    version: int


class LedgerStore:
    """The ledgers of one namespace."""

    def __init__(self, store: MetadataStore, paths: NamespacePaths) -> None:
        self._store = store
        self._paths = paths
        self._id_lock = asyncio.Lock()  # tasks of one process do not compete for ids
        self._ids: deque[int] = deque()  # taken from the counter, not given to a ledger yet
        self._parents: set[str] = set()  # parent nodes of ledgers that are known to exist

    async def new_ledger_id(self) -> int:
        """Return an id that no ledger has or had; an id is used at most once."""
        async with self._id_lock:
            if not self._ids:
                first = await self._take_ids()
                self._ids.extend(range(first, first + _IDS_AT_ONCE))
            return self._ids.popleft()

    async def next_ledger_id(self) -> int:
        """Return the lowest id that no client has taken; all ids taken before this call are lower.

        Raises:
            CorruptMetadataError: the node of the counter is missing or damaged.
        """
        path = self._paths.ledger_idgen
        node = await self._store.get(path, fresh=True)
        if node is None:
            raise CorruptMetadataError(f"{path} does not exist: the next ledger id is unknown")
        return _parse_id(node.value, path)

    async def _take_ids(self) -> int:
        """Advance the counter past a range of ids; return the first of them."""
        path = self._paths.ledger_idgen
        lost_replies = 0
        for _ in range(_ID_CONFLICTS_MAX):
            node = await self._store.get(path)
            if node is None:
                raise NoNodeError(f"{path} does not exist: {self._paths.root} is no namespace")
            first = _parse_id(node.value, path)
            # With the parent node, so that the creation of the ledger takes one round trip.
            try:
                await all_of(
                    self._store.put(path, b"%d" % (first + _IDS_AT_ONCE), version=node.version),
                    self._make_parent(self._paths.ledger(first)),
                )
            except MetadataVersionError:
                continue
            except MetadataConnectionError:
                # The next read shows whether it was applied.  Skipped ids do no harm.
                lost_replies += 1
                if lost_replies == _ATTEMPTS_MAX:
                    raise
                continue
            return first
        raise MetadataVersionError(f"{path} changed {_ID_CONFLICTS_MAX} times in a row")

    async def create(
        self, metadata: LedgerMetadata, *, extra_ops: Sequence[Op] = ()
    ) -> VersionedLedger:
        """Create the ledger and apply `extra_ops`, in one transaction.

        Raises:
            LedgerExistsError: the ledger exists, and another creator made it.
            MetadataError: the error of the first of `extra_ops` that failed, or of the store.
        """
        path = self._paths.ledger(metadata.ledger_id)
        value = encode(metadata)
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            try:
                await self._store.multi([Create(path, value), *extra_ops])
            except NoNodeError:
                # The first of every 10,000 ledgers needs another parent node.
                if path.rpartition("/")[0] in self._parents:
                    raise  # a node that extra_ops need is missing
                await self._make_parent(path)
            except (NodeExistsError, MetadataConnectionError) as error:
                found = await self._find_own(metadata, error)
                if found is not None:
                    return found
                if attempt == _ATTEMPTS_MAX:
                    raise
            else:
                return VersionedLedger(metadata, 0)
        raise MetadataConnectionError(f"{path}: {_ATTEMPTS_MAX} attempts to create it failed")

    async def read(self, ledger_id: int, *, fresh: bool = False) -> VersionedLedger:
        """Return the ledger's metadata.

        With `fresh` the answer has everything that was stored before this call.  Without it the
        answer may come from a server of the metadata store that is behind the others.

        Raises:
            LedgerNotFoundError: there is no such ledger.
        """
        found = await self._find(ledger_id, fresh=fresh)
        if found is None:
            raise LedgerNotFoundError(f"ledger {ledger_id} does not exist")
        return found

    async def read_many(self, ledger_ids: Sequence[int], *, fresh: bool = False) -> ReadLedgers:
        """Return the metadata of those of the ledgers that exist, in one round trip.

        Damaged metadata of one ledger does not hide the others.  Unless `fresh`, the answer may
        come from a server of the metadata store that is behind the others.
        """
        paths = [self._paths.ledger(ledger_id) for ledger_id in ledger_ids]
        nodes = await self._read_nodes(paths, fresh=fresh)
        ledgers: ReadLedgers = {}
        for ledger_id, node, path in zip(ledger_ids, nodes, paths, strict=True):
            try:
                if node is not None:
                    ledgers[ledger_id] = _decoded(ledger_id, node, path).metadata
            except CorruptMetadataError as error:
                ledgers[ledger_id] = error
        return ledgers

    async def _read_nodes(
        self, paths: Sequence[str], *, fresh: bool = False
    ) -> list[Versioned | None]:
        parts = [paths[at : at + _READ_AT_ONCE] for at in range(0, len(paths), _READ_AT_ONCE)]
        found = await together(*(self._store.get_many(part, fresh=fresh) for part in parts))
        return [node for part in found for node in part]

    async def write(
        self, metadata: LedgerMetadata, *, version: int, guards: Sequence[Op] = ()
    ) -> int:
        """Compare-and-set the ledger's metadata, if `guards` hold; return the new version.

        Raises:
            MetadataVersionError: another client changed it: read it and decide again.
            LedgerNotFoundError: it was deleted.
        """
        ledger_id = metadata.ledger_id
        path = self._paths.ledger(ledger_id)
        value = encode(metadata)
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            try:
                if guards:
                    await self._store.multi([*guards, Put(path, value, version)])
                    return version + 1
                return await self._store.put(path, value, version=version)
            except NoNodeError as error:
                raise LedgerNotFoundError(f"ledger {ledger_id} does not exist") from error
            except MetadataConnectionError:
                # Version and value: another client may have made a change of the same version.
                node = await self._store.get(path, fresh=True)
                if node is None:
                    raise LedgerNotFoundError(f"ledger {ledger_id} does not exist") from None
                if node.version == version + 1 and node.value == value:
                    return node.version
                if attempt == _ATTEMPTS_MAX:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def put(self, metadata: LedgerMetadata, *, version: int) -> Op:
        """Return the compare-and-set of the ledger's metadata, to be put into a transaction."""
        return Put(self._paths.ledger(metadata.ledger_id), encode(metadata), version)

    async def delete(self, ledger_id: int, *, version: int = ANY_VERSION) -> None:
        """Delete the ledger's metadata; bookies drop its entries some time later."""
        path = self._paths.ledger(ledger_id)
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            try:
                return await self._store.delete(path, version=version)
            except NoNodeError as error:
                raise LedgerNotFoundError(f"ledger {ledger_id} does not exist") from error
            except MetadataConnectionError:
                # Ids are never used again, so a missing ledger is the deleted one.
                if await self._store.get(path, fresh=True) is None:
                    return None
                if attempt == _ATTEMPTS_MAX:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def list_ledgers(self, *, first: int = 0) -> AsyncGenerator[int, None]:
        """Yield the ids of ledgers from `first` on, ascending; reads one directory at a time."""
        id_of = self._paths.ledger_id_of
        ledgers = self._paths.ledgers
        names = await self._store.get_children(ledgers)
        idgen = self._paths.ledger_idgen.rpartition("/")[2]
        highs = _numbers(ledgers, [name for name in names or () if name != idgen])
        # Only these have no fixed width: the names below them are in order as they come.
        for high in sorted(highs, key=int):
            if id_of(str(int(high) + 1), "0", "0") <= first:
                continue
            above = f"{ledgers}/{high}"
            for middle in _numbers(above, await self._store.get_children(above) or ()):
                if id_of(high, str(int(middle) + 1), "0") <= first:
                    continue
                parent = f"{above}/{middle}"
                for low in _numbers(parent, await self._store.get_children(parent) or ()):
                    if (ledger_id := id_of(high, middle, low)) >= first:
                        yield ledger_id

    async def read_from(self, first: int, count: int) -> ReadLedgers:
        """Return the metadata of up to `count` ledgers with ids from `first` on, ascending.

        Damaged metadata of one ledger does not hide the others.  The result is empty only if no
        ledger from `first` on exists.
        """
        while True:
            ids: list[int] = []
            async with aclosing(self.list_ledgers(first=first)) as found:
                async for ledger_id in found:
                    ids.append(ledger_id)
                    if len(ids) == count:
                        break
            ledgers = await self.read_many(ids)
            if ledgers or not ids:
                return ledgers
            first = ids[-1] + 1  # all of them were deleted during the read

    def watch(self, ledger_id: int, callback: Callable[[], None]) -> Unsubscribe:
        """Call `callback` after the ledger's metadata may have changed; level-triggered."""
        return self._store.watch(self._paths.ledger(ledger_id), callback)

    async def _make_parent(self, path: str) -> None:
        parent = path.rpartition("/")[0]
        if parent in self._parents:
            return
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            try:
                # The order matters: the parent's parent first.  Both go in one round trip.
                await all_of(self._ensure(parent.rpartition("/")[0]), self._ensure(parent))
            except MetadataConnectionError:
                if attempt == _ATTEMPTS_MAX:
                    raise
            else:
                self._parents.add(parent)
                return

    async def _ensure(self, path: str) -> None:
        with suppress(NodeExistsError):
            await self._store.create(path)

    async def _find_own(
        self, metadata: LedgerMetadata, error: NodeExistsError | MetadataConnectionError
    ) -> VersionedLedger | None:
        """Return the ledger if this creator made it, whichever `error` the store returned.

        A session repeats a request that got no reply; the repeated one fails: the node exists.
        """
        found = await self._find(metadata.ledger_id, fresh=True)
        if found is not None and found.metadata.token == metadata.token:
            return found
        if isinstance(error, MetadataConnectionError):
            return None
        if found is None:
            raise error  # the node that exists is one of extra_ops
        raise LedgerExistsError(f"ledger {metadata.ledger_id} exists") from error

    async def _find(self, ledger_id: int, *, fresh: bool) -> VersionedLedger | None:
        path = self._paths.ledger(ledger_id)
        node = await self._store.get(path, fresh=fresh)
        return None if node is None else _decoded(ledger_id, node, path)


def _decoded(ledger_id: int, node: Versioned, path: str) -> VersionedLedger:
    metadata = decode(LedgerMetadata, node.value, source=path)
    if metadata.ledger_id != ledger_id:
        raise CorruptMetadataError(f"{path} holds the metadata of {metadata.ledger_id}")
    return VersionedLedger(metadata, node.version)


def _parse_id(value: bytes, path: str) -> int:
    if not value.isdigit() or len(value) > _ID_DIGITS_MAX or int(value) >= 2**63:
        raise CorruptMetadataError(
            f"{path}: expected a decimal number below 2**63, not {value[:40]!r}"
        )
    return int(value)


def _numbers(parent: str, names: Iterable[str]) -> list[str]:
    """Return the names that are part of a ledger's path, and log a warning if there are others."""
    found = [name for name in names if is_number(name)]
    if len(found) < len(tuple(names)):
        logger.warning(
            "below %s are nodes that are no part of a ledger's path; to do: find out which "
            "program made them, and remove them",
            parent,
        )
    return found
