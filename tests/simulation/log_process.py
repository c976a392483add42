"""A process that uses logs: a real `DirectNamespace` over the simulated ports."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast
from zlib import crc32

from dlcore.backends.direct.namespace import DirectNamespace
from dlcore.base.access.encryption_keys import SALT_BYTES, EncryptionKeys
from dlcore.base.access.master_keys import MASTER_KEY_BYTES, MasterKey, MasterKeys
from dlcore.base.config import LogConfig
from dlcore.log.cold.reading import ColdLedgers, here
from dlcore.ops.upkeep.config import MergePolicy, UpkeepConfig
from dlcore.ops.upkeep.merger import LogMerger
from dlcore.ops.upkeep.tierer import LogTierer
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.simulation.cold_store import ColdStoreOfProcess
from tests.simulation.world import MERGED_GRACE_S, TIER_GRACE_S

if TYPE_CHECKING:
    import random

    from dlcore.metadata.port import MetadataStore
    from tests.simulation.world import World

_NEVER_S = 1e6
"""No notification is lost here, so no reader may need to look again because it waits for long."""
_LARGE = (4_000, 20_000)
_SEGMENT_BYTES = (1_200, *_LARGE)
MERGE_POLICY = MergePolicy(
    large_weight=30_000, fan_in=3, run_weight_max=90_000, run_extents_max=40, run_ledgers_max=20
)
UPKEEP = UpkeepConfig(
    upkeep_interval_s=1.0,
    sweep_interval_s=2.0,
    logs_at_once=2,
    merge_bytes_per_s=1e6,
    merged_grace_s=MERGED_GRACE_S,
    leftovers_age_s=1.0,
    commits_age_s=1e6,
    merge=MERGE_POLICY,
)
UPKEEP_OF_TIERS = replace(
    UPKEEP,
    tier_interval_s=1.0,
    sweep_interval_s=1.0,
    tier_bytes_per_s=5e4,
    tier_object_bytes=200,
    tier_grace_s=TIER_GRACE_S,
    stray_interval_s=0.5,
    stray_age_s=0.0,
    merge=replace(MERGE_POLICY, run_extents_max=12, run_ledgers_max=6),
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
            reader_idle_warn_s=_NEVER_S,
            encrypted=world.plan.is_encrypted and crc32(name.encode()) % 4 > 0,
        )
        self.cold = None
        if world.cold is not None:
            self.cold = ColdLedgers(ColdStoreOfProcess(world.cold, client), run=here)
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
            cold=self.cold,
        )
        client.parts.append(self.namespace)

    def note(self, what: str) -> None:
        """Add a line to the trace."""
        self.world.trace.note(self.name, what)

    def merger(self) -> LogMerger:
        """Return a merger that asks no one."""
        namespace = self.namespace
        return LogMerger(
            namespace.log_context, namespace.staging_owner, policy=MERGE_POLICY, bytes_per_s=1e6
        )

    def upkeep(self) -> LogUpkeep:
        """Return a worker as the service runs it."""
        has_tier = self.world.plan.has_tier
        return LogUpkeep.of(self.namespace, UPKEEP_OF_TIERS if has_tier else UPKEEP)

    def tierer(self) -> LogTierer:
        """Return a tierer that asks no one."""
        return LogTierer(self.namespace.log_context, self.namespace.staging_owner, UPKEEP_OF_TIERS)
