"""The node of a process that stages: it shows others that the process lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dlcore.base.features import UNKNOWN_RELEASE, Release, own_release
from dlcore.metadata.session_node import SessionNode
from dlcore.metadata.stored import LAYOUT, encode

if TYPE_CHECKING:
    from dlcore.base.clock import Clock
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore


class StagingProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that stages; `owner` is for people."""

    layout: int = LAYOUT
    owner: str
    release: Release = UNKNOWN_RELEASE


class StagingOwner(SessionNode):
    """The node of a process that stages; its token is stored with the ledgers that it stages.

    The token does not change.  Ledgers from before a lost session that were not reaped meanwhile
    still count as owned.
    """

    def __init__(
        self, store: MetadataStore, paths: NamespacePaths, *, clock: Clock, client_id: str
    ) -> None:
        self.token = clock.new_token()
        super().__init__(
            store,
            paths.staging_owner(self.token),
            until_then="open appends of this process may be given up as left behind",
        )
        self.value = encode(StagingProcess(owner=client_id, release=own_release()))
