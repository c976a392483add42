"""Limits of a bookie's storage: frozen values, validated when built."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlcore.base.config import (
    ENTRY_SIZE_BYTES_MAX,
    MIB,
    checked,
    require,
    require_not_negative,
    require_positive,
)


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceConfig:
    """When a full disk makes the bookie read-only, and when it becomes writable again."""

    read_only_below_bytes: int = 512 * MIB
    """With less free space, ordinary adds are refused.  The rest is reserved for work that keeps
    ledgers safe or frees space."""
    writable_above_bytes: int = 768 * MIB
    """Ordinary adds are accepted again from this free space on.  The distance prevents flapping."""
    minimum_bytes: int = 64 * MIB
    """With less free space, recovery adds and LACs are refused too.  The rest is reserved for
    fences, marks, footers and garbage collection.  A quarter of it is held back on the disk, so
    that other programs cannot take it."""
    check_interval_s: float = 5.0
    """How often a read-only bookie checks the free space.  A writable bookie checks after each
    write.  If nothing was written for six times as long, a bookie checks the space, and writes a
    small file to see whether its disk takes writes."""

    @property
    def fence_floor_bytes(self) -> int:
        """Free space that fences must leave for marks, footers and garbage collection."""
        return self.minimum_bytes // 8

    @property
    def held_bytes(self) -> int:
        """Bytes that are held back on the disk."""
        return self.minimum_bytes // 4

    def __post_init__(self) -> None:
        require(
            condition=0
            <= self.minimum_bytes
            <= self.read_only_below_bytes
            <= self.writable_above_bytes,
            key="minimum_bytes/read_only_below_bytes/writable_above_bytes",
            value=(
                f"{self.minimum_bytes}/{self.read_only_below_bytes}/{self.writable_above_bytes}"
            ),
            rule="expected 0 <= minimum <= read-only <= writable",
        )
        require_positive(self, "check_interval_s")


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageConfig:
    """Conditions under which the bookie drops the data of a deleted ledger."""

    age_ms: int = 10 * 60 * 1000
    """A ledger must look deleted in two passes at least this far apart."""
    brake_share: float = 0.8
    """When more than this share of the ledgers looks deleted at once, they are held back …"""
    brake_count: int = 100
    """… if it is also more than this many ledgers: a small bookie may lose all of them at once."""
    brake_age_ms: int = 24 * 60 * 60 * 1000
    """A ledger that is held back must look deleted in every pass for this long.  In this time an
    operator can find the cause, and can restore metadata that was lost by accident.  A restart
    begins the time again."""

    def __post_init__(self) -> None:
        require(
            condition=self.age_ms >= 0, key="age_ms", value=self.age_ms, rule="expected ms >= 0"
        )
        require(
            condition=self.brake_age_ms >= self.age_ms,
            key="brake_age_ms",
            value=self.brake_age_ms,
            rule=f"expected at least age_ms={self.age_ms}",
        )
        require(
            condition=0 < self.brake_share <= 1,
            key="brake_share",
            value=self.brake_share,
            rule="expected 0 < share <= 1",
        )
        require_not_negative(self, "brake_count")


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionConfig:
    """When the live records of a mostly dead file are copied away, and how fast."""

    below_live_share: float = 0.5
    """A sealed file is compacted when less than this share of its bytes is live; 0: never."""
    full_below_live_share: float = 0.8
    """The same share while the bookie is read-only: then smaller savings are worth the copying."""
    bytes_per_second: int = 16 * MIB
    """Most bytes of records copied in a second."""
    floor_bytes: int = 32 * MIB
    """Free space that copies must leave on the disk.  Copies may use the rest of the reserve."""

    def __post_init__(self) -> None:
        for key in ("below_live_share", "full_below_live_share"):
            value = getattr(self, key)
            require(condition=0 <= value < 1, key=key, value=value, rule="expected 0 <= share < 1")
        require_positive(self, "bytes_per_second")
        require_not_negative(self, "floor_bytes")


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubConfig:
    """How fast all stored data is read to find damage."""

    bytes_per_second: int = 8 * MIB
    """Most bytes read in a second.  At the default a terabyte takes a day and a half."""

    def __post_init__(self) -> None:
        require_positive(self, "bytes_per_second")


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """Limits of the entry log; the defaults bound a bookie's memory to well under 300 MB."""

    file_bytes_max: int = 256 * MIB
    """An entry log file is sealed before it grows beyond this; only the last file is replayed."""
    file_entries_max: int = 500_000
    """The same limit as a number of entries: the index of the unsealed file takes 16 bytes of
    memory for each entry."""
    file_records_max: int = 1_000_000
    """The same limit as a number of records of any kind, mostly LACs: each record takes time at
    replay."""
    batch_bytes_max: int = 8 * MIB
    """Most bytes of one gathered write and fdatasync; it bounds what one flush can delay."""
    in_flight_bytes_max: int = 64 * MIB
    """Most bytes that are accepted and not yet durable; beyond it adds are refused with
    `BookieOverloadedError`."""
    entry_size_bytes_max: int = ENTRY_SIZE_BYTES_MAX
    """Largest frame of an entry that is accepted; the protocol carries no larger one."""
    open_files_max: int = 128
    """Most sealed files that are kept open."""
    footer_bytes_max: int = 48 * MIB
    """Most bytes of sealed files' footers that are kept in memory; each entry takes 16 bytes of
    footer."""
    damaged_entries_max: int = 10_000
    """Most damaged entries that are remembered for repair; further ones are found again later."""
    settle_interval_s: float = 1.0
    """Within this time after a flush, the bookie logs a record that proves that the flush was
    durable."""
    lac_delay_s: float = 0.001
    """How long an explicit LAC waits for an add that shares its flush.  Without such an add the LAC
    gets its own flush.  The writer's next add often follows at once, and the disk must not be busy
    then."""
    space: SpaceConfig = field(default_factory=SpaceConfig)
    garbage: GarbageConfig = field(default_factory=GarbageConfig)
    compact: CompactionConfig = field(default_factory=CompactionConfig)
    scrub: ScrubConfig = field(default_factory=ScrubConfig)

    def __post_init__(self) -> None:
        require_positive(
            self,
            "file_entries_max",
            "file_records_max",
            "batch_bytes_max",
            "in_flight_bytes_max",
            "entry_size_bytes_max",
            "open_files_max",
            "footer_bytes_max",
            "damaged_entries_max",
            "settle_interval_s",
            "lac_delay_s",
        )
        require(
            condition=0 < self.file_bytes_max <= 2**31,
            key="file_bytes_max",
            value=self.file_bytes_max,
            rule="expected 1 … 2**31: offsets within a file are 32 bits wide",
        )
        require(
            condition=self.entry_size_bytes_max <= 2**29,
            key="entry_size_bytes_max",
            value=self.entry_size_bytes_max,
            rule="expected at most 2**29",
        )
