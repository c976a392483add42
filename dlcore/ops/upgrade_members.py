"""Reads the releases of a cluster's members, and finalizes features.

Members are processes that are registered: bookies, proxies, auto-recovery, and clients that hold a
log's writer lock or stage an append.  Readers are none, since they store nothing that others read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from dlcore.base.errors import CorruptMetadataError, DLError
from dlcore.base.features import own_release
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.log.metadata.owner import StagingProcess
from dlcore.log.metadata.values import LockHolder
from dlcore.metadata.binding import finalize_features, read_binding
from dlcore.metadata.paths import BUCKETS, unescape
from dlcore.metadata.stored import decode
from dlcore.ops.autorecovery.values import RecoveryMember
from dlcore.ops.upgrade_report import Member, Role, UpgradeReport
from dlcore.proxy.load import LiveProxy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.backends.direct.ports import NamespacePorts

_LOCKS_AT_ONCE = 1_000
_Value = TypeVar("_Value", BookieRegistration, LiveProxy, RecoveryMember, LockHolder)


async def look(ports: NamespacePorts) -> UpgradeReport:
    """Return all members.  Raises: MetadataError: the store failed."""
    await ports.store.sync(ports.paths.root)
    binding = await read_binding(ports.store, ports.paths)
    members = await _Members(ports).read()
    return UpgradeReport(own=own_release(), finalized=binding.features, members=members)


async def finalize(ports: NamespacePorts) -> UpgradeReport:
    """Finalize all features of this release; return what the cluster is afterwards.

    A member that comes meanwhile looks at the finalized features after it is registered, so it
    either sees them, or is in the report.

    Raises:
        DLError: something stands in the way; the message says what.
        MetadataError: the store failed; they may be finalized or not.
    """
    report = await look(ports)
    if report.obstacles:
        raise DLError(f"not finalized, {report.summary()}")
    if report.unfinalized:
        await finalize_features(ports.store, ports.paths, report.unfinalized)
    return await look(ports)


class _Members:
    """One reading of the members of a namespace."""

    def __init__(self, ports: NamespacePorts) -> None:
        self._store, self._paths = ports.store, ports.paths

    async def read(self) -> tuple[Member, ...]:
        servers = [*await self._bookies(), *await self._recoveries(), *await self._proxies()]
        known = {each.name for each in servers}
        # Proxies hold locks of logs as well, and are among the servers already.
        clients = {each.name: each for each in await self._clients() if each.name not in known}
        return (*servers, *clients.values())

    async def _bookies(self) -> list[Member]:
        above = (self._paths.bookies_available, self._paths.bookies_readonly)
        return [
            _member(Role.BOOKIE, name, value)
            for parent in above
            for name, value in (await self._below(parent, BookieRegistration)).items()
        ]

    async def _proxies(self) -> list[Member]:
        found = await self._below(self._paths.proxies, LiveProxy)
        return [_member(Role.PROXY, name, value) for name, value in found.items()]

    async def _recoveries(self) -> list[Member]:
        found = await self._below(self._paths.recovery_members, RecoveryMember)
        names = {name: getattr(value, "owner", name) for name, value in found.items()}
        return [_member(Role.AUTORECOVERY, names[name], value) for name, value in found.items()]

    async def _clients(self) -> list[Member]:
        heads = [f"{self._paths.heads}/{bucket}" for bucket in BUCKETS]
        found = zip(heads, await self._store.get_children_many(heads), strict=True)
        locks = [f"{parent}/{log}/lock" for parent, logs in found for log in logs or ()]
        members = []
        for start in range(0, len(locks), _LOCKS_AT_ONCE):
            part = locks[start : start + _LOCKS_AT_ONCE]
            holders = zip(part, await self._values(part, LockHolder), strict=True)
            members += [
                _member(Role.CLIENT, getattr(value, "owner", path), value)
                for path, value in holders
                if value is not None
            ]
        return members + await self._staging()

    async def _staging(self) -> list[Member]:
        parent = self._paths.staging_owners
        names = await self._store.get_children(parent) or ()
        nodes = await self._store.get_many([f"{parent}/{name}" for name in names])
        return [
            _staging_member(name, node.value)
            for name, node in zip(names, nodes, strict=True)
            if node is not None
        ]

    async def _below(
        self, parent: str, kind: type[_Value]
    ) -> dict[str, _Value | CorruptMetadataError]:
        names = await self._store.get_children(parent) or ()
        values = await self._values([f"{parent}/{name}" for name in names], kind)
        pairs = zip(names, values, strict=True)
        return {unescape(name): value for name, value in pairs if value is not None}

    async def _values(
        self, paths: Sequence[str], kind: type[_Value]
    ) -> list[_Value | CorruptMetadataError | None]:
        nodes = zip(paths, await self._store.get_many(paths), strict=True)
        return [
            None if node is None else _decoded(kind, node.value, source=path)
            for path, node in nodes
        ]


def _decoded(kind: type[_Value], value: bytes, *, source: str) -> _Value | CorruptMetadataError:
    try:
        return decode(kind, value, source=source)
    except CorruptMetadataError as error:
        return error


def _member(role: Role, name: str, value: Any) -> Member:
    if isinstance(value, CorruptMetadataError):
        return Member(role, name, problem=str(value))
    return Member(role, name, value.release)


def _staging_member(name: str, value: bytes) -> Member:
    try:
        found = decode(StagingProcess, value, source=name)
    except CorruptMetadataError as error:
        return Member(Role.CLIENT, f"staging {name}", problem=str(error))
    return Member(Role.CLIENT, found.owner, found.release)
