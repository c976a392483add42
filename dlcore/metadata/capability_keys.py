"""The keys of a cluster's capabilities: one node, whose readers can sign capabilities.

Each rotation adds a key.  Signers use it a moment later, when bookies have learned of it, and keys
before it verify until the last capability that they signed has expired.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import msgspec

from dlcore.base.access.capability import (
    EVERYTHING,
    KEY_BYTES,
    LIFETIME_S_MAX,
    SKEW_S,
    OwnPurse,
    Signer,
    new_private_key,
)
from dlcore.base.errors import (
    ConfigurationError,
    MetadataVersionError,
)
from dlcore.metadata.one_node import NodeFollower, change_node
from dlcore.metadata.stored import LAYOUT, Count, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.base.access.capability import Purse
    from dlcore.base.clock import Clock
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Versioned

logger = logging.getLogger(__name__)

SPREAD_S = 60
"""A new key signs so long after it was made: all bookies have it by then."""
KEYS_MAX = 32
"""Most keys of a cluster; one that was replaced leaves a day later."""
_OWN_LIFETIME_S = 3600
"""For how long each capability is valid that a client signs for itself; it renews them."""
_HEX = rf"\A[0-9a-f]{{{2 * KEY_BYTES}}}\Z"
_Key = Annotated[str, msgspec.Meta(pattern=_HEX)]


class StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key; `private` is empty once another one signs."""

    public: _Key
    private: Annotated[str, msgspec.Meta(pattern=rf"\A([0-9a-f]{{{2 * KEY_BYTES}}})?\Z")]
    signs_from_s: Count

    def __repr__(self) -> str:
        return f"<StoredKey {self.public}>"  # without the private one, which is a secret

    @property
    def public_key(self) -> bytes:
        """The public key's bytes."""
        return bytes.fromhex(self.public)


class KeyRing(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a cluster, from the oldest on; the last ones may not sign yet."""

    layout: int = LAYOUT
    keys: Annotated[tuple[StoredKey, ...], msgspec.Meta(min_length=1, max_length=KEYS_MAX)]

    def __post_init__(self) -> None:
        if not any(key.private for key in self.keys):
            raise ConfigurationError("no key has a private one: expected it of the last")

    def signer(self, now_s: float) -> Signer:
        """Return the signer of now; before any key signs, the first one does."""
        able = [key for key in self.keys if key.private]
        due = [key for key in able if key.signs_from_s <= now_s]
        return Signer(bytes.fromhex((due or able[:1])[-1].private))

    def rotated(self, private_key: bytes, now_s: int) -> KeyRing:
        """Return the ring with a new key, without those that nothing valid is signed with.

        Raises:
            ConfigurationError: it was rotated too often lately.
        """
        kept: list[StoredKey] = []
        new = _stored(private_key, now_s + SPREAD_S)
        for key, after in zip(self.keys, (*self.keys[1:], new), strict=True):
            # Twice the skew: once for a signer that is slow to change its key, once for the bookie
            # that verifies.
            if now_s <= after.signs_from_s + LIFETIME_S_MAX + 2 * SKEW_S:
                is_replaced = after.signs_from_s + SKEW_S < now_s
                kept.append(msgspec.structs.replace(key, private="") if is_replaced else key)
        if len(kept) >= KEYS_MAX:
            raise ConfigurationError(
                f"the cluster has {len(kept)} keys that may have signed valid capabilities, the "
                "most: wait, or withdraw them all"
            )
        return KeyRing(keys=(*kept, new))


def _stored(private_key: bytes, signs_from_s: int) -> StoredKey:
    public = Signer(private_key).public_key.hex()
    return StoredKey(public=public, private=private_key.hex(), signs_from_s=signs_from_s)


def _new_ring(clock: Clock) -> KeyRing:
    return KeyRing(keys=(_stored(new_private_key(), clock.now_ms() // 1000),))


async def ensure_keys(store: MetadataStore, paths: NamespacePaths, clock: Clock) -> KeyRing:
    """Return the cluster's keys, made if there are none.  Raises: MetadataError."""

    def change(node: Versioned | None) -> tuple[KeyRing, bytes | None]:
        if node is not None:
            return decode(KeyRing, node.value, source=paths.capability_keys), None
        ring = _new_ring(clock)
        return ring, encode(ring)

    return await change_node(store, paths.capability_keys, change)


async def rotate_keys(
    store: MetadataStore, paths: NamespacePaths, clock: Clock, *, withdraw: bool = False
) -> KeyRing:
    """Add a key, or with `withdraw` replace all of them, which ends all capabilities at once.

    Raises:
        ConfigurationError: too many keys.
        MetadataVersionError: another client rotates them at the same time.
    """
    await ensure_keys(store, paths, clock)
    node = await store.get(paths.capability_keys, fresh=True)
    if node is None:
        raise MetadataVersionError(f"{paths.capability_keys} was deleted meanwhile")
    ring = decode(KeyRing, node.value, source=paths.capability_keys)
    now_s = clock.now_ms() // 1000
    ring = _new_ring(clock) if withdraw else ring.rotated(new_private_key(), now_s)
    await store.put(paths.capability_keys, encode(ring), version=node.version)
    return ring


class FollowedKeys:
    """The cluster's keys, read again when they change.

    Args:
        on_change: gets the keys at the start and after each change.
    """

    def __init__(
        self,
        store: MetadataStore,
        paths: NamespacePaths,
        clock: Clock,
        on_change: Callable[[KeyRing], None],
    ) -> None:
        self._store = store
        self._paths = paths
        self._clock = clock
        self._on_change = on_change
        self.ring: KeyRing | None = None
        """The present keys, once started."""
        self._follower: NodeFollower | None = None

    async def start(self) -> None:
        """Read them, made if there are none.  Raises: MetadataError."""
        self._use(await ensure_keys(self._store, self._paths, self._clock))
        path = self._paths.capability_keys
        self._follower = NodeFollower(self._store, path, self._look, what="keys of capabilities")

    async def aclose(self) -> None:
        """Stop following them."""
        if self._follower is not None:
            await self._follower.aclose()

    def _use(self, ring: KeyRing) -> None:
        self.ring = ring
        self._on_change(ring)

    async def _look(self) -> None:
        path = self._paths.capability_keys
        node = await self._store.get(path)
        if node is not None:
            self._use(decode(KeyRing, node.value, source=path))


async def own_purse(
    store: MetadataStore, paths: NamespacePaths, clock: Clock
) -> tuple[Purse, FollowedKeys]:
    """Return capabilities that a client signs itself, with the keys, followed from now on."""

    def now_s() -> float:
        return clock.now_ms() / 1000

    def make(expires_s: int) -> bytes:
        assert keys.ring is not None, "its start has read it"
        return keys.ring.signer(now_s()).sign([EVERYTHING], expires_s=expires_s)

    purse = OwnPurse(make, now_s, lifetime_s=_OWN_LIFETIME_S)
    keys = FollowedKeys(store, paths, clock, lambda _: purse.renew())
    await keys.start()
    return purse, keys
