"""Capabilities that a client signs for itself, with the cluster's key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.access.capability import EVERYTHING
from dlcore.access.holding import OwnPurse
from dlcore.metadata.capability_keys import FollowedKeys

if TYPE_CHECKING:
    from dlcore.access.holding import Purse
    from dlcore.base.clock import Clock
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore

_LIFETIME_S = 3600
"""For how long each capability is valid; the client renews them."""


async def own_purse(
    store: MetadataStore, paths: NamespacePaths, clock: Clock
) -> tuple[Purse, FollowedKeys]:
    """Return capabilities that this client signs, with the keys, which are followed from now on."""

    def now_s() -> float:
        return clock.now_ms() / 1000

    def make(expires_s: int) -> bytes:
        assert keys.ring is not None, "its start has read it"
        return keys.ring.signer(now_s()).sign([EVERYTHING], expires_s=expires_s)

    purse = OwnPurse(make, now_s, lifetime_s=_LIFETIME_S)
    keys = FollowedKeys(store, paths, clock, lambda _: purse.renew())
    await keys.start()
    return purse, keys
