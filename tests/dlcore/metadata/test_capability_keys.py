"""Goal: a cluster has one ring of keys; a rotation leaves no valid capability without its key."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from dlcore.base.access.capability import (
    LIFETIME_S_MAX,
    SKEW_S,
    Grant,
    LedgerRight,
    Verifier,
    new_private_key,
)
from dlcore.base.errors import AccessDeniedError, ConfigurationError, CorruptMetadataError
from dlcore.metadata.capability_keys import (
    KEYS_MAX,
    SPREAD_S,
    FollowedKeys,
    KeyRing,
    ensure_keys,
    rotate_keys,
)
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.stored import decode, encode
from tests.fixtures.served_bookie import run
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    from dlcore.metadata.port import MetadataStore

PATHS = NamespacePaths("/dlog")
GRANTS = [Grant.of(1, LedgerRight.READ)]


class StoppedClock:
    """Time that the test moves."""

    now_s = 1_800_000_000

    def now_ms(self) -> int:
        """Return it."""
        return self.now_s * 1000

    def new_token(self) -> str:
        """Return nothing that is needed here."""
        raise NotImplementedError


async def opened() -> tuple[MetadataStore, StoppedClock]:
    """Return a store with the root, and a clock."""
    store = SimulatedTree().connect()
    await store.create(PATHS.root)
    return store, StoppedClock()


def test_keys_are_made_once() -> None:
    """Two that need them at the same time get the same ones, and each later one, too."""

    async def scenario() -> None:
        store, clock = await opened()
        rings = await asyncio.gather(*(ensure_keys(store, PATHS, clock) for _ in range(3)))
        assert rings[0] == rings[1] == rings[2] == await ensure_keys(store, PATHS, clock)
        assert rings[0].signer(0).public_key == rings[0].keys[0].public_key
        await store.aclose()

    run(scenario)


def test_a_rotation_leaves_no_valid_capability_behind() -> None:
    """The new key signs a moment later; an old one verifies as long as anything is valid by it."""
    clock = StoppedClock()
    verifier = Verifier(lambda: clock.now_s)

    async def scenario() -> None:
        store, _ = await opened()
        signed: list[tuple[int, bytes]] = []
        for step in range(200):
            ring = await ensure_keys(store, PATHS, clock)
            expires_s = clock.now_s + LIFETIME_S_MAX
            signed.append((expires_s, ring.signer(clock.now_s).sign(GRANTS, expires_s=expires_s)))
            if step % 8 == 0:
                ring = await rotate_keys(store, PATHS, clock)
            verifier.use(key.public_key for key in ring.keys)
            signed = [each for each in signed if each[0] >= clock.now_s]
            for _, token in signed:
                verifier.verify(token)
            assert len(ring.keys) <= 6
            assert 1 <= sum(bool(key.private) for key in ring.keys) <= 3
            clock.now_s += 3600
        await store.aclose()

    run(scenario)


def test_a_new_key_signs_once_bookies_have_it() -> None:
    """Not at once; then the one before has no private key any more at the next rotation."""

    async def scenario() -> None:
        store, clock = await opened()
        first = await ensure_keys(store, PATHS, clock)
        second = await rotate_keys(store, PATHS, clock)
        old, new = (key.public_key for key in second.keys)
        assert old == first.keys[0].public_key
        assert second.signer(clock.now_s + SPREAD_S - 1).public_key == old
        assert second.signer(clock.now_s + SPREAD_S).public_key == new
        clock.now_s += SPREAD_S + SKEW_S + 1
        third = await rotate_keys(store, PATHS, clock)
        assert [bool(key.private) for key in third.keys] == [False, True, True]
        await store.aclose()

    run(scenario)


def test_keys_that_are_withdrawn_verify_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """All of them at once, for a key that was stolen."""

    async def scenario() -> None:
        store, clock = await opened()
        ring = await ensure_keys(store, PATHS, clock)
        token = ring.signer(clock.now_s).sign(GRANTS, expires_s=clock.now_s + 9)
        verifier = Verifier(lambda: clock.now_s)
        keys = FollowedKeys(
            store, PATHS, clock, lambda ring: verifier.use(key.public_key for key in ring.keys)
        )
        await keys.start()
        verifier.verify(token)
        ring = await rotate_keys(store, PATHS, clock, withdraw=True)
        new = ring.signer(clock.now_s).sign(GRANTS, expires_s=clock.now_s + 9)
        while True:
            try:
                verifier.verify(new)
                break
            except AccessDeniedError:
                await asyncio.sleep(0.01)
        with pytest.raises(AccessDeniedError, match="not known"):
            verifier.verify(token)
        await store.put(PATHS.capability_keys, b"{}", version=1)  # what is damaged changes nothing
        while "keys of capabilities: a change is not known yet" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        verifier.verify(new)
        await keys.aclose()
        await store.aclose()

    run(scenario)


def test_keys_are_not_rotated_too_often() -> None:
    """Each may have signed; the ring has a bound."""

    async def scenario() -> None:
        store, clock = await opened()
        for _ in range(KEYS_MAX - 1):
            await rotate_keys(store, PATHS, clock)
        with pytest.raises(ConfigurationError, match=f"has {KEYS_MAX} keys"):
            await rotate_keys(store, PATHS, clock)
        await store.aclose()

    run(scenario)


def test_a_ring_without_a_private_key_is_damaged_and_none_is_shown() -> None:
    """It could sign nothing; and its text has public keys only."""

    async def scenario() -> None:
        store, clock = await opened()
        ring = await ensure_keys(store, PATHS, clock)
        (key,) = ring.keys
        assert key.private not in f"{ring!r} {key!r}"
        value = encode(ring).replace(key.private.encode(), b"")
        with pytest.raises(CorruptMetadataError, match="no key has a private one"):
            decode(KeyRing, value, source="here")
        with pytest.raises(CorruptMetadataError, match="does not parse"):
            decode(KeyRing, msgspec.json.encode({"layout": 2, "keys": []}), source="here")
        assert len(new_private_key()) * 2 == len(key.private)
        await store.aclose()

    run(scenario)
