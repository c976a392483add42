"""A process that uses logs: a real `DirectNamespace` over the simulated ports."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast
from zlib import crc32

from dlcore.access.encryption_keys import SALT_BYTES, EncryptionKeys
from dlcore.access.master_keys import MASTER_KEY_BYTES, MasterKey, MasterKeys
from dlcore.backends.direct.namespace import DirectNamespace
from dlcore.base.config import LogConfig
from dlcore.ops.upkeep.config import MergePolicy
from dlcore.ops.upkeep.merger import LogMerger

if TYPE_CHECKING:
    import random

    from dlcore.metadata.port import MetadataStore
    from tests.simulation.world import World

_LARGE = (4_000, 20_000)
_SEGMENT_BYTES = (1_200, *_LARGE)
MERGE_POLICY = MergePolicy(
    large_weight=30_000, fan_in=3, run_weight_max=90_000, run_extents_max=40, run_ledgers_max=20
)


def _keys_of(rng: random.Random) -> EncryptionKeys:
    key = MasterKey("sim", bytes(MASTER_KEY_BYTES))
    return EncryptionKeys(MasterKeys([key]), new_salt=partial(rng.randbytes, SALT_BYTES))


class LogProcess:
    """A process with a namespace of its own, known by `identity` where it owns something.

    One that does not roll soon writes large segments, so that what waits for it has an end.
    """

    def __init__(
        self, world: World, name: str, *, identity: str | None = None, rolls_soon: bool = True
    ) -> None:
        self.world = world
        self.name = name
        self.client = world.new_client(name)
        client, rng = self.client, world.rng
        entry_bytes = rng.choice((30, 200, 2000))
        segment_bytes = rng.choice(_SEGMENT_BYTES if world.plan.log_writers != 0 else _LARGE)
        self.config = LogConfig(
            quorum=world.plan.quorum,
            entry_bytes=entry_bytes,
            segment_bytes_max=segment_bytes if rolls_soon else max(_LARGE),
            lock_timeout_s=1.0,
            read_ahead_bytes=rng.choice((1, 10_000)),
            read_unavailable_timeout_s=4.0,
            encrypted=world.plan.is_encrypted and crc32(name.encode()) % 4 > 0,
        )
        self.namespace = DirectNamespace(
            uri="simulated",
            store=cast("MetadataStore", client.store),
            bookies=client.bookies,
            paths=world.paths,
            cluster_id=world.cluster_id,
            clock=client.clock,
            rng=client.rng,
            config=self.config,
            client_config=client.config,
            client_id=identity or name,
            registry=client.registry,
            encryption_keys=_keys_of(client.rng) if world.plan.is_encrypted else None,
        )
        client.parts.append(self.namespace)

    def note(self, what: str) -> None:
        """Add a line to the trace."""
        self.world.trace.note(self.name, what)

    def merger(self) -> LogMerger:
        """Return a merger that asks nobody."""
        namespace = self.namespace
        return LogMerger(namespace._context, namespace._owner, policy=MERGE_POLICY, bytes_per_s=1e6)
