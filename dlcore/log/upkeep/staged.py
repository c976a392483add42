"""Ledgers that several extents share: registered, counted, settled, and removed with the last one.

A staged ledger is registered beside its metadata, in the transaction that creates it, and listed
under its identity.  A commit counts the extents that it adds, and a removal of extents subtracts
them, in the transactions that change the logs.  Therefore it is never necessary to search logs for
a ledger.  Once its owner is gone the ledger is settled: it is closed and no longer listed, or
removed if no extent refers to it.  Each step is guarded by the registration's version: if a commit
and a removal meet, one wins and the other one fails.

A merge copies the entries of ledgers elsewhere, but readers with an older view of the log still
read the old ledgers.  Therefore a ledger that ever lost extents to a merge is not removed with its
last extent, but listed, and removed some time later.  The same holds for a cold ledger, however it
lost extents: reads of objects are planned long ahead, and its objects go once it is gone.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from dlcore.base.background import all_of, together
from dlcore.base.errors import (
    CorruptMetadataError,
    LedgerNotFoundError,
    LedgerRecoveryError,
    MetadataVersionError,
    NodeExistsError,
    NodeNotEmptyError,
    NoNodeError,
    WriteError,
)
from dlcore.base.html_tables import ShownFields
from dlcore.base.isolating import Troubles
from dlcore.ledger.metadata.values import COLD_LAYOUT, LedgerMetadata, LedgerState
from dlcore.log.metadata.nodes import StagedNode, decode_node, release
from dlcore.log.metadata.values import StagedLedger
from dlcore.metadata.one_node import persistently
from dlcore.metadata.paths import is_number
from dlcore.metadata.port import UNANSWERED, Check, Create, Delete, Op
from dlcore.metadata.stored import encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from dlcore.base.config import QuorumConfig
    from dlcore.ledger.metadata.store import VersionedLedger
    from dlcore.ledger.writing.writer import LedgerWriter
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.owner import StagingOwner

    _Register = Callable[[int], tuple[Op, ...]]

logger = logging.getLogger(__name__)

_Ledger = TypeVar("_Ledger")

_CREATE_ATTEMPTS_MAX = 10


async def create_staged_ledger(
    context: LogContext,
    owner: StagingOwner,
    quorum: QuorumConfig,
    *,
    identity: str,
    custom: Mapping[str, str],
) -> LedgerWriter:
    """Create a ledger, registered to the owner and listed under the identity.

    Raises:
        WriteError: other changes overtook every attempt.
        DLError: no ledger can be created now.
    """
    noted = {**custom, "staged_by": identity}
    return await _registered(
        context,
        owner,
        identity,
        lambda register: context.ledgers.create_ledger(quorum, custom=noted, extra_ops=register),
    )


async def create_cold_ledger(
    context: LogContext,
    owner: StagingOwner,
    quorum: QuorumConfig,
    *,
    identity: str,
    folder: str,
    custom: Mapping[str, str],
) -> VersionedLedger:
    """Create an empty cold ledger whose objects will be in a folder; as `create_staged_ledger`."""
    noted = {**custom, "staged_by": identity}

    async def create(register: _Register) -> VersionedLedger:
        ledger_id = await context.ledger_store.new_ledger_id()
        metadata = LedgerMetadata(
            layout=COLD_LAYOUT,
            ledger_id=ledger_id,
            quorum=quorum,
            state=LedgerState.CLOSED,
            ensembles=(),
            token=context.clock.new_token(),
            created_ms=context.clock.now_ms(),
            custom=noted,
            folder=folder,
        )
        return await context.ledger_store.create(metadata, extra_ops=register(ledger_id))

    return await _registered(context, owner, identity, create)


async def _registered(
    context: LogContext,
    owner: StagingOwner,
    identity: str,
    create: Callable[[_Register], Awaitable[_Ledger]],
) -> _Ledger:
    """Return the result of `create`, to which it gives the operations that register the ledger."""
    paths = context.paths

    def register(ledger_id: int) -> tuple[Op, ...]:
        staged = StagedLedger(
            ledger_id=ledger_id,
            identity=identity,
            owner=owner.token,
            created_ms=context.clock.now_ms(),
        )
        return (
            # Only while the owner's node exists: `settle` takes a ledger without one for abandoned.
            Check(owner.path, 0),
            Create(paths.staged_ledger(ledger_id), encode(staged)),
            Create(paths.staging_entry(identity, ledger_id)),
        )

    for _ in range(_CREATE_ATTEMPTS_MAX):
        await all_of(owner.ensure(), _make_list(context, identity))
        with contextlib.suppress(NoNodeError, NodeExistsError, MetadataVersionError):
            # The list may be removed as empty meanwhile, or the session may be lost.
            return await create(register)
    raise WriteError(
        f"staging for {identity!r}: {_CREATE_ATTEMPTS_MAX} attempts to create a ledger were "
        "overtaken"
    )


async def _make_list(context: LogContext, identity: str) -> None:
    """Make the node below which ledgers of an identity are listed."""

    async def make() -> None:
        with contextlib.suppress(NodeExistsError):  # the identity staged something before
            await context.store.create(context.paths.staging_of(identity))

    await persistently(make)


async def read_staged(context: LogContext, ledger_ids: Sequence[int]) -> dict[int, StagedNode]:
    """Return the current registrations of those of the ledgers that have one."""
    if not ledger_ids:
        return {}
    paths = [context.paths.staged_ledger(ledger_id) for ledger_id in ledger_ids]
    nodes = await persistently(lambda: context.store.get_many(paths, fresh=True))
    found = (
        (ledger_id, decode_node(context.paths, ledger_id, node))
        for ledger_id, node in zip(ledger_ids, nodes, strict=True)
    )
    return {ledger_id: node for ledger_id, node in found if node is not None}


async def plan_releases(
    context: LogContext, counts: Mapping[int, int], *, cold: Collection[int] = ()
) -> list[Op]:
    """Return the operations that release a number of extents of each ledger, as in `counts`.

    A ledger that is not registered has one extent, and is removed with it.  A ledger that is gone
    already does not stop the removal of the others.  Ledgers that are `cold` stay for a grace, as
    those do that merges emptied: readers have planned to read their objects.
    """
    nodes = await read_staged(context, sorted(counts))
    paths = {each: context.paths.ledger(each) for each in sorted(counts) if each not in nodes}
    ops: list[Op] = []
    if paths:
        found = await persistently(lambda: context.store.get_many(list(paths.values()), fresh=True))
        for (ledger_id, path), ledger in zip(paths.items(), found, strict=True):
            if ledger is None:
                logger.warning(
                    "ledger=%d was gone before the extent that refers to it; to do: dlog log "
                    "inspect, then dlog log repair: records are lost",
                    ledger_id,
                )
            else:
                ops.append(Delete(path))
    now_ms = context.clock.now_ms()
    for ledger_id, node in nodes.items():
        staged = node.staged.released(counts[ledger_id])
        if ledger_id in cold:
            staged = replace(staged, released_ms=now_ms)
        ops += release(context.paths, node, staged)
    return ops


async def read_owners(context: LogContext) -> set[str]:
    """Return the tokens of the processes that stage now."""
    return set(await context.store.get_children(context.paths.staging_owners, fresh=True) or ())


async def list_staged(context: LogContext, identity: str) -> list[int]:
    """Return the ledgers of an identity that are not settled."""
    parent = context.paths.staging_of(identity)
    names = await persistently(lambda: context.store.get_children(parent))
    return sorted(int(name) for name in names or () if is_number(name))


async def read_readable(
    context: LogContext, ledger_ids: Sequence[int]
) -> tuple[dict[int, StagedNode], set[int]]:
    """Return the result of `read_staged`, and the ledgers whose registrations are damaged.

    A damaged registration does not hide the others: it is logged and left as it is.
    """
    paths = [context.paths.staged_ledger(ledger_id) for ledger_id in ledger_ids]
    nodes = await persistently(lambda: context.store.get_many(paths, fresh=True)) if paths else []
    found: dict[int, StagedNode] = {}
    damaged: set[int] = set()
    for ledger_id, node in zip(ledger_ids, nodes, strict=True):
        try:
            staged = decode_node(context.paths, ledger_id, node)
        except CorruptMetadataError as error:
            logger.warning(
                "staged ledger=%d is not changed: %s; to do: nothing, it is tried again in the "
                "next round",
                ledger_id,
                error,
            )
            damaged.add(ledger_id)
        else:
            if staged is not None:
                found[ledger_id] = staged
    return found, damaged


async def settle(
    context: LogContext,
    ledger_ids: Sequence[int],
    *,
    created_before_ms: int | None = None,
    in_round: str = "",
) -> int:
    """Settle those of the ledgers that no process fills any more; return how many.

    In a round of appends that share ledgers, only those that an earlier round found abandoned are
    settled: the others may hold records that a concurrent append is about to commit.
    """
    count = 0
    troubles = Troubles()
    nodes, _ = await read_readable(context, ledger_ids)
    # Read after the registrations: a registration is only made while its owner's node exists.
    owners = await persistently(lambda: read_owners(context))
    for node in nodes.values():
        staged = node.staged
        is_young = created_before_ms is not None and staged.created_ms >= created_before_ms
        if staged.settled or staged.owner in owners or is_young:
            continue
        if in_round and staged.left_in in ("", in_round):
            await _note_left(context, node, in_round)
            continue
        with troubles.isolated(f"settling staged ledger {staged.ledger_id}"):
            count += await drop(context, node)
    for identity in sorted({node.staged.identity for node in nodes.values()}):
        await _remove_if_empty(context, context.paths.staging_of(identity))
    return count


async def _note_left(context: LogContext, node: StagedNode, in_round: str) -> None:
    if node.staged.left_in:
        return
    try:
        await context.store.multi([node.put(replace(node.staged, left_in=in_round))])
    except (MetadataVersionError, NoNodeError, *UNANSWERED) as error:
        logger.info("staged ledger=%d is not marked as left: %s", node.staged.ledger_id, error)


async def drop(context: LogContext, node: StagedNode) -> bool:
    """Settle a ledger that no process fills: close it, or remove it if no extent refers to it.

    Returns: False if the registration is being changed, or the ledger cannot be closed now.
    """
    staged = node.staged
    ledger_id = staged.ledger_id
    ops: list[Op] = [Delete(context.paths.staging_entry(staged.identity, ledger_id))]
    try:
        # Before the ledger leaves the list: nothing looks at it again afterwards, and after a crash
        # between the two it would stay open.
        if staged.extents:
            await _close(context, ledger_id)
        ops += release(context.paths, node, replace(staged, owner="", settled=True))
        await context.store.multi(ops)
    except (MetadataVersionError, NoNodeError, *UNANSWERED) as error:
        logger.info("staged ledger=%d is not settled now: %s", ledger_id, error)
    except LedgerRecoveryError as error:
        logger.warning(
            "staged ledger=%d cannot be closed yet: %s; to do: nothing, it is tried again; see "
            "that its bookies run if it comes again",
            ledger_id,
            error,
        )
    else:
        logger.info("settled staged ledger=%d extents=%d", ledger_id, staged.extents)
        return True
    return False


async def _close(context: LogContext, ledger_id: int) -> None:
    try:
        await context.ledgers.recover_ledger(ledger_id)
    except LedgerNotFoundError:
        logger.warning(
            "ledger=%d is gone, and extents refer to it; to do: dlog log inspect, then dlog log "
            "repair: records are lost",
            ledger_id,
        )


async def drop_merged(
    context: LogContext,
    *,
    grace_ms: int,
    cold_grace_ms: int | None = None,
    at_once: Collection[int] = (),
) -> int:
    """Delete the ledgers that were emptied longer ago than the grace; return how many.

    Cold ledgers have a grace of their own, if one is given.  With `at_once` only these are deleted,
    and without a grace.
    """
    now_ms = context.clock.now_ms()
    before_ms = now_ms - grace_ms
    paths = context.paths
    names = await persistently(lambda: context.store.get_children(paths.merged))
    ids = sorted(int(name) for name in names or () if is_number(name))
    if at_once:
        ids = [each for each in ids if each in at_once]
    nodes, damaged = await read_readable(context, ids)
    young = [
        each.staged.ledger_id
        for each in nodes.values()
        if cold_grace_ms is not None and each.staged.released_ms > now_ms - cold_grace_ms
    ]
    ledgers = await persistently(lambda: context.ledger_store.read_many(young)) if young else {}
    kept = {i for i, each in ledgers.items() if isinstance(each, LedgerMetadata) and each.is_cold}
    count = 0
    for ledger_id in ids:
        if ledger_id in damaged or ledger_id in kept:
            continue
        node = nodes.get(ledger_id)
        ops: list[Op] = [Delete(paths.merged_ledger(ledger_id))]
        if node is not None:
            if node.staged.extents or (not at_once and node.staged.released_ms > before_ms):
                continue
            ops += [Delete(node.path, node.version), Delete(paths.ledger(ledger_id))]
        try:
            await context.store.multi(ops)
        except (MetadataVersionError, NoNodeError, *UNANSWERED) as error:
            logger.info("merged ledger=%d is deleted later: %s", ledger_id, error)
        else:
            count += 1
    return count


async def _remove_if_empty(context: LogContext, parent: str) -> None:
    async def remove() -> None:
        if await context.store.get_children(parent) == []:
            await context.store.delete(parent)

    try:
        await persistently(remove)
    except (NodeNotEmptyError, NoNodeError):
        logger.debug("%s is in use, or gone", parent)


async def list_identities(context: LogContext) -> list[str]:
    """Return the identities that have ledgers which are not settled."""
    return sorted(await context.logs.list_names(context.paths.staging))


async def settle_abandoned(context: LogContext, *, created_before_ms: int) -> int:
    """Settle the ledgers of identities that never came back; return how many.

    Ledgers that cannot be settled now are left for a later call.
    """
    count = 0
    troubles = Troubles()
    for identity in await list_identities(context):
        with troubles.isolated(f"leftovers of append {identity} stay"):
            ledger_ids = await list_staged(context, identity)
            count += await settle(context, ledger_ids, created_before_ms=created_before_ms)
            if not ledger_ids:
                await _remove_if_empty(context, context.paths.staging_of(identity))
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedStatus(ShownFields):
    """A ledger that is not settled: more of its entries may be committed."""

    staged: StagedLedger
    is_filled: bool
    """Whether the process that fills it lives."""


async def list_all_staged(context: LogContext) -> list[StagedStatus]:
    """Return the ledgers of all identities that are not settled, by identity and ledger."""
    identities = await list_identities(context)
    lists = await together(*(list_staged(context, identity) for identity in identities))
    nodes, _ = await read_readable(context, [ledger_id for ids in lists for ledger_id in ids])
    owners = await persistently(lambda: read_owners(context))
    found = [
        StagedStatus(staged=node.staged, is_filled=node.staged.owner in owners)
        for node in nodes.values()
    ]
    return sorted(found, key=lambda each: (each.staged.identity, each.staged.ledger_id))
