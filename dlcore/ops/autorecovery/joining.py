"""The registration of a process of auto-recovery, by which others see its release."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from dlcore.base.features import own_release
from dlcore.log.metadata.owner import SessionNode
from dlcore.metadata.binding import read_binding
from dlcore.metadata.stored import encode
from dlcore.ops.autorecovery.values import RecoveryMember

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dlcore.backends.direct.ports import NamespacePorts


@asynccontextmanager
async def joined(ports: NamespacePorts, *, owner: str) -> AsyncGenerator[None, None]:
    """Be registered meanwhile; `owner` is the name of the process, as its auditor has it.

    Raises:
        UnsupportedError: this release lacks a feature of the cluster.
        MetadataError: the store failed.
    """
    node = SessionNode(ports.store, ports.paths.recovery_member(ports.clock.new_token()))
    node.value = encode(RecoveryMember(owner=owner, release=own_release()))
    try:
        await node.ensure()
        # What is finalized from now on was asked of this process, too.
        await read_binding(ports.store, ports.paths, fresh=True)
        yield
    finally:
        await node.aclose()
