"""Configuration of every client component: frozen value objects, validated when built."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, wraps
from numbers import Integral, Real
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from dlcore.base.errors import ConfigurationError, LogModeError
from dlcore.base.html_tables import ShownFields
from dlcore.base.ids import DLSN

if TYPE_CHECKING:
    from collections.abc import Mapping

_Model = TypeVar("_Model")
_KINDS: dict[object, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "text"),
    bool: (bool, "True or False"),
    type(None): (type(None), "None"),
    DLSN: (DLSN, "a DLSN, as of DLSN.parse('1:0:0')"),
}
MIB = 1024 * 1024
SECONDS_MAX = 100 * 365 * 24 * 3600
"""The longest time of a setting, a hundred years: added to the clock's time, it gives a time that
can be stored and shown."""
NUMBER_MAX = 2**53
"""The largest value of other numbers: every reader of JSON keeps it exactly."""
RECORD_SIZE_BYTES_MAX = MIB - 8 * 1024
"""Largest payload of one record, DistributedLog's own limit (distributedlog.md section 3.2)."""

FLUSH_INTERVAL_S = 0.005
"""How long a blocking writer keeps a record before it sends it in the background."""

ENTRY_SIZE_BYTES_MAX = 4 * MIB
"""Largest frame a bookie accepts; a full 1 MiB entry and its Arrow overhead stay well below."""


def require(*, condition: bool, key: str, value: object, rule: str) -> None:
    """Raise `ConfigurationError` naming `key`, `value` and the broken `rule` unless `condition`."""
    if not condition:
        raise ConfigurationError(f"{key}={value!r}: {rule}")


def require_kind(key: str, value: object, kind: type) -> None:
    """Raise `ConfigurationError` naming `key` and `value` unless the value is of `kind`."""
    expected, name = _KINDS.get(kind, (kind, f"a {kind.__name__}"))
    require(condition=_is_of(value, expected), key=key, value=value, rule=f"expected {name}")


def require_bounded(key: str, value: object, *, may_be_endless: bool = False) -> None:
    """Raise `ConfigurationError` if a number cannot be counted and stored.

    The unit at the end of the key decides how large the number may be.  With `may_be_endless` it
    may also be infinite, which means never.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if may_be_endless and value == math.inf:
        return
    name = key.removesuffix("_max")
    if name.endswith("_ms"):
        most, unit = SECONDS_MAX * 1000, " milliseconds"
    elif name.endswith("_s") and not name.endswith("_per_s"):
        most, unit = SECONDS_MAX, " seconds"
    else:
        most, unit = NUMBER_MAX, ""
    require(
        condition=-most <= value <= most,  # also False for NaN
        key=key,
        value=value,
        rule=f"expected a number of at most {most}{unit}",
    )


def require_count(count: int) -> None:
    """Raise `ConfigurationError` unless `count` is a valid number of records."""
    require_kind("count", count, int)
    require(condition=count > 0, key="count", value=count, rule="expected a number > 0")


def require_positive(config: object, *keys: str) -> None:
    """Raise `ConfigurationError` naming the first of these values that is not above 0."""
    for key in keys:
        value = getattr(config, key)
        require(condition=value > 0, key=key, value=value, rule="expected a number > 0")


def require_not_negative(config: object, *keys: str) -> None:
    """Raise `ConfigurationError` naming the first of these values that is below 0."""
    for key in keys:
        value = getattr(config, key)
        require(condition=value >= 0, key=key, value=value, rule="expected a number >= 0")


def check_values(model: type, values: Mapping[str, object]) -> None:
    """Refuse keys that a configuration does not have, and values of the wrong kind.

    Raises:
        ConfigurationError: it names the key, the value, and the rule.
    """
    hints = _hints_of(model) if values else {}
    for key, value in values.items():
        require(
            condition=key in hints,
            key=key,
            value=value,
            rule=f"{model.__name__} has {', '.join(hints)}",
        )
        kinds = get_args(hints[key]) if isinstance(hints[key], UnionType) else (hints[key],)
        expected = [_KINDS.get(kind, (get_origin(kind) or kind, kind.__name__)) for kind in kinds]
        require(
            condition=any(_is_of(value, kind) for kind, _ in expected),
            key=key,
            value=value,
            rule=f"expected {' or '.join(name for _, name in expected)}",
        )
        require_bounded(key, value, may_be_endless=key in _endless_of(model))


@cache
def _endless_of(model: type) -> frozenset[str]:
    """Return the settings that are infinite by default, and therefore may be infinite."""
    found = fields(model) if is_dataclass(model) else ()
    return frozenset(each.name for each in found if each.default == math.inf)


@cache
def _hints_of(model: type) -> dict[str, Any]:
    return get_type_hints(model)


def _is_of(value: object, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def checked(model: type[_Model]) -> type[_Model]:
    """Make a dataclass refuse wrong keys and values at its creation, by `check_values`."""
    changed: Any = model
    build = changed.__init__

    @wraps(build)
    def build_checked(self: _Model, /, **values: object) -> None:
        check_values(model, values)
        build(self, **values)

    changed.__init__ = build_checked
    return model


class _CheckedStruct(type(msgspec.Struct)):  # type: ignore[misc]
    """The same for a struct; msgspec checks values that it decodes."""

    def __call__(cls, *arguments: object, **values: object) -> Any:
        check_values(cls, {**dict(zip(cls.__struct_fields__, arguments, strict=False)), **values})
        return super().__call__(*arguments, **values)


class QuorumConfig(
    ShownFields,
    msgspec.Struct,
    metaclass=_CheckedStruct,
    frozen=True,
    array_like=True,
):
    """E, Qw and Qa of a ledger, in this order; E >= Qw >= Qa >= 1.

    Acknowledged entries survive the loss of Qa - 1 bookies.
    """

    ensemble_size: int = 3
    """Bookies over which a ledger's entries are spread."""
    write_quorum_size: int = 3
    """Bookies that store each entry."""
    ack_quorum_size: int = 2
    """Bookies that have an entry on disk before it is acknowledged."""

    def __post_init__(self) -> None:
        require(
            condition=self.ensemble_size >= self.write_quorum_size >= self.ack_quorum_size >= 1,
            key="ensemble_size/write_quorum_size/ack_quorum_size",
            value=str(self),
            rule="expected E >= Qw >= Qa >= 1",
        )

    def __str__(self) -> str:
        return f"{self.ensemble_size}/{self.write_quorum_size}/{self.ack_quorum_size}"

    def reduced_to(self, bookies: int) -> QuorumConfig:
        """Return the quorum of a ledger with only `bookies` bookies, if these are fewer than E.

        Each of them stores every entry, also if E is above Qw.  Therefore another bookie can join
        the closed ledger with a copy of all entries, and no entry of the other bookies moves.  Qa
        stays the same, and with it the number of bookies whose loss acknowledged entries survive.
        """
        if bookies >= self.ensemble_size:
            return self
        size = min(bookies, self.write_quorum_size)
        return QuorumConfig(
            ensemble_size=size, write_quorum_size=size, ack_quorum_size=self.ack_quorum_size
        )

    def enlarged(self) -> QuorumConfig:
        """Return the quorum with one more bookie, which stores every entry as the others do."""
        assert self.ensemble_size == self.write_quorum_size
        size = self.ensemble_size + 1
        return QuorumConfig(
            ensemble_size=size, write_quorum_size=size, ack_quorum_size=self.ack_quorum_size
        )

    @classmethod
    def of_replication_factor(cls, replication_factor: int) -> QuorumConfig:
        """Return N/N/N: no acknowledged entry is lost while any one of the N bookies lives."""
        return cls(
            ensemble_size=replication_factor,
            write_quorum_size=replication_factor,
            ack_quorum_size=replication_factor,
        )


DEFAULT_QUORUM = QuorumConfig()

DEFAULT_RACK = "/default-rack"
"""The rack of a bookie without a configured rack."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig(ShownFields):
    """How a client spreads ensembles over racks."""

    racks_per_write_quorum_min: int = 2
    """Racks that the Qw bookies of each entry span, if that many racks have writable bookies."""
    enforce_racks: bool = False
    """Whether to fail if too few racks have writable bookies.  Otherwise fewer racks, or one rack
    for all bookies, are accepted."""
    enforce_ensemble_size: bool = False
    """Whether to fail if fewer bookies are writable than the ensemble needs.  Otherwise a ledger is
    created with fewer bookies, but never with fewer than Qa."""

    def __post_init__(self) -> None:
        require(
            condition=self.racks_per_write_quorum_min >= 1,
            key="racks_per_write_quorum_min",
            value=self.racks_per_write_quorum_min,
            rule="expected a number >= 1",
        )


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineConfig(ShownFields):
    """When a client stops choosing a bookie that fails, and for how long."""

    window_s: float = 60.0
    """Answers older than one to two windows do not count any more."""
    failures_min: int = 3
    """Failures in the window before a bookie is quarantined."""
    failure_share: float = 0.5
    """Share of failures among the bookie's answers; ignored while no bookie succeeds at all."""
    period_s: float = 120.0
    """Length of a quarantine, changed at random by up to half of it; a success ends it at once."""

    def __post_init__(self) -> None:
        require_positive(self, "window_s", "period_s")
        require(
            condition=self.failures_min >= 1,
            key="failures_min",
            value=self.failures_min,
            rule="expected a number >= 1",
        )
        require(
            condition=0 < self.failure_share <= 1,
            key="failure_share",
            value=self.failure_share,
            rule="expected 0 < share <= 1",
        )


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerClientConfig(ShownFields):
    """Configuration of the client of bookies."""

    add_timeout_s: float = 10.0
    """A bookie that has not answered an add in this time is replaced; BookKeeper uses 5 s on
    servers."""
    read_timeout_s: float = 10.0
    """A read without an answer in this time counts as unknown."""
    speculative_read_delay_s: float = 1.0
    """After this time without an answer a range read also asks the next replica."""
    pending_bytes_max: int = 64 * MIB
    """Most entry bytes of all writers together that are not yet answered by (or given up on)
    *every* bookie of their write set.  Beyond it writers wait in turn; a writer without entries in
    flight does not wait."""
    pending_entries_max: int = 10_000
    """The same limit as a number of entries."""
    read_chunk_bytes: int = 3 * MIB + MIB // 4
    """Size of one message of a range read, as a hint to the bookie: six full entries of a log, with
    their headers, or many small ones."""
    placement: PlacementConfig = PlacementConfig()
    """How ensembles are spread over racks, and how small they may be."""
    bookies_wait_s: float = 20.0
    """How long a new ledger, or an entry that cannot reach Qa, waits while too few bookies are
    writable, for example while they start; 0: it fails at once."""
    cold_reads_at_once: int = 8
    """Parts of cold segments that are read from their store at the same time, by all readers of the
    process together; with 1 nothing is read ahead."""
    cold_read_bytes: int = 128 * MIB
    """Most bytes of such parts that were read and not yet given to their readers; a part has some
    8 MiB of records."""
    quarantine: QuarantineConfig = QuarantineConfig()
    """When a bookie that fails is not chosen any more, and for how long."""

    def __post_init__(self) -> None:
        require_positive(
            self,
            "add_timeout_s",
            "read_timeout_s",
            "speculative_read_delay_s",
            "pending_bytes_max",
            "pending_entries_max",
            "read_chunk_bytes",
            "cold_reads_at_once",
            "cold_read_bytes",
        )
        require_not_negative(self, "bookies_wait_s")


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(ShownFields):
    """Configuration of writers and readers; the quorum at a log's creation is stored with it."""

    quorum: QuorumConfig = DEFAULT_QUORUM
    """How many bookies hold a segment, an entry, and an acknowledged entry: E, Qw and Qa."""
    entry_bytes: int = 512 * 1024
    """Target size of a full entry; small writes are sent at once if nothing is in flight."""
    segment_bytes_max: int = 256 * MIB
    """A segment that reaches this size is completed and the next one started."""
    segment_age_max_s: float = 2 * 3600.0
    """The same limit as an age; the first limit reached counts (docs/differences.md)."""
    compression: str = "auto"
    """Compression of Arrow's buffers in entries: none, lz4 or zstd.  With auto, entries of typed
    logs from 32 KiB on use lz4, and byte logs use none.  An entry that becomes less than an eighth
    smaller is stored uncompressed."""
    encrypted: bool = False
    """Whether records are encrypted before they are sent to bookies, with the keys of
    `open_namespace(encryption_keys=…)`; a writer without keys is refused (docs/encryption.md)."""
    lock_enabled: bool = True
    """Whether writers take the log's lock; without it only fencing excludes a second writer."""
    lock_timeout_s: float = 20.0
    """How long `open_writer` and a staged append wait for another owner; 0 fails at once.  The
    session of a dead owner lasts 10 s and a tick of ZooKeeper."""
    pending_bytes_max: int = 128 * MIB
    """Most bytes that are not answered; beyond it a writer refuses records.  A wait for capacity
    ends when at most a quarter of this is pending.  The bytes that all writers together have sent
    are bounded by `LedgerClientConfig.pending_bytes_max`, for which they wait in turn."""
    pending_records_max: int = 1_000_000
    """The same limit as a number of records."""
    fail_while_rolling: bool = False
    """Whether to refuse records while the next segment is started, or the lock is lost, instead of
    keeping them until then."""
    buffer_bytes: int = MIB
    """The blocking writer passes its records on when it holds this many bytes; 0: each at once."""
    flush_interval_s: float = FLUSH_INTERVAL_S
    """The blocking writer passes records on in the background after this time; 0: only when its
    buffer is full or flushed.  Records that were passed on are sent at once, unless an entry is in
    flight."""
    read_ahead_bytes: int = 8 * MIB
    """Most bytes that a reader fetches ahead of its caller.  When a few MiB of a segment are left,
    it also reads the beginning of the next one, if that is complete."""
    read_unavailable_timeout_s: float = 30.0
    """A reader that waits for a record fails after this long without ZooKeeper or any bookie."""
    reader_idle_warn_s: float = 120.0
    """After this long without a record, a waiting reader logs a warning and reads the log's
    metadata again."""
    reader_idle_error_s: float = math.inf
    """After this long without a record, a reader fails with `ReaderIdleError`; by default never."""

    def with_settings(self, settings: LogSettings) -> LogConfig:
        """Return the configuration for a log with these settings, which take precedence."""
        given = {key: getattr(settings, key) for key in _OVERRIDES}
        return replace(self, **{key: value for key, value in given.items() if value is not None})

    def __post_init__(self) -> None:
        require(
            condition=self.compression in ("auto", "none", "lz4", "zstd"),
            key="compression",
            value=self.compression,
            rule="expected auto, none, lz4 or zstd",
        )
        require(
            condition=1 <= self.entry_bytes <= MIB,
            key="entry_bytes",
            value=self.entry_bytes,
            rule="expected 1 … 1048576",
        )
        require_positive(
            self,
            "segment_bytes_max",
            "segment_age_max_s",
            "pending_bytes_max",
            "pending_records_max",
            "read_ahead_bytes",
            "read_unavailable_timeout_s",
            "reader_idle_warn_s",
            "reader_idle_error_s",
        )
        require_not_negative(self, "lock_timeout_s", "flush_interval_s", "buffer_bytes")


NEW_LOG_SETTINGS = ("retention_s", "explicit_truncation")
"""The settings of logs that a cluster may give to those that are created."""

_TIER = re.compile(r"(?:s3://[a-z0-9][a-z0-9.-]+|file://)(?:/(?!\.\.?(?:/|$))[\w.=+-]+)+", re.ASCII)
TIER_RULE = (
    "expected s3://bucket/folder or file:///folder, in ASCII letters, digits and . _ = + - alone, "
    "without a slash at the end"
)
NO_TIER = "none"
"""The tier of a log that stays on bookies whatever the namespace says."""


def require_tier(key: str, url: str | None, *, rule: str = TIER_RULE) -> None:
    """Raise `ConfigurationError` if a tier is no URL of one; None is right."""
    condition = url is None or _TIER.fullmatch(url) is not None
    require(condition=condition, key=key, value=url, rule=rule)


class LogSettings(
    ShownFields,
    msgspec.Struct,
    metaclass=_CheckedStruct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
):
    """Settings that are stored with one log and hold for all its writers.

    They may change at any time.  A running writer applies a change as soon as it learns of it.
    """

    entry_bytes: int | None = None
    """As in `LogConfig`; None: the value of the writer's own configuration."""
    segment_bytes_max: int | None = None
    """As in `LogConfig`; None: the value of the writer's own configuration."""
    segment_age_max_s: float | None = None
    """As in `LogConfig`; None: the value of the writer's own configuration."""
    compression: str | None = None
    """As in `LogConfig`; None: the value of the writer's own configuration."""
    encrypted: bool | None = None
    """As in `LogConfig`; None: the value of the writer's own configuration."""

    retention_s: float | None = None
    """Records older than this are removed, also from a log without a writer; None: they stay.  A
    whole segment is removed when its last record is old enough."""
    retention_bytes: int | None = None
    """The oldest segments are removed, also from a tier, while the newer ones together have this
    many bytes; None: records stay.  The segment in progress stays.  Not with
    `explicit_truncation`."""
    explicit_truncation: bool = False
    """With `retention_s`: only truncated records are removed, once they are old enough."""

    tier: str | None = None
    """Where completed segments go as Parquet objects: ``s3://bucket/folder``, or ``file:///folder``
    on a cluster of one host; ``none``: they stay on bookies; None: as the namespace says.  A log
    that is encrypted stays there."""
    tier_after_s: float | None = None
    """With a tier: how old a segment's last record is when the segment goes there; None: as the
    namespace says, an hour by default."""
    tier_after_bytes: int | None = None
    """With a tier: a segment goes there at any age once the log has so many newer bytes on bookies;
    None: only by its age."""
    table: str | None = None
    """With `tier`: ``delta`` or ``iceberg`` makes a table of the objects in that format; None: none
    is made or kept up to date."""

    mode: str = "any"
    """Which programs may open writers from now on: ``direct``: programs with access to bookies;
    ``proxied``: proxies; ``any``: both.  Atomic appends, as of Spark, are always allowed."""

    def __post_init__(self) -> None:
        LogConfig().with_settings(self)  # raises for a wrong value
        require_bounded("retention_s", self.retention_s)
        require(
            condition=self.mode in ("direct", "proxied", "any"),
            key="mode",
            value=self.mode,
            rule="expected direct, proxied or any",
        )
        require_bounded("tier_after_s", self.tier_after_s)
        require(
            condition=self.tier_after_s is None or self.tier_after_s >= 0,
            key="tier_after_s",
            value=self.tier_after_s,
            rule="expected seconds >= 0, or nothing: an hour",
        )
        require_bounded("tier_after_bytes", self.tier_after_bytes)
        require_bounded("retention_bytes", self.retention_bytes)
        require(
            condition=self.tier_after_bytes is None or self.tier_after_bytes >= 0,
            key="tier_after_bytes",
            value=self.tier_after_bytes,
            rule="expected bytes >= 0, or nothing: only age counts",
        )
        if self.tier != NO_TIER:
            require_tier("tier", self.tier, rule=f"{TIER_RULE}, or {NO_TIER}")
        require(
            condition=self.tier_url is None or not self.encrypted,
            key="tier",
            value=self.tier,
            rule="expected none with encrypted=True: an encrypted log stays on bookies",
        )
        is_known = self.table in (None, "delta", "iceberg")
        formats, place = "expected delta or iceberg, or nothing", "expected a tier of the log's own"
        require(
            condition=is_known and (self.table is None or self.tier_url is not None),
            key="table",
            value=self.table,
            rule=place if is_known else formats,
        )
        require(
            condition=self.retention_s is None or self.retention_s > 0,
            key="retention_s",
            value=self.retention_s,
            rule="expected seconds > 0, or nothing: records stay",
        )
        require(
            condition=self.retention_bytes is None or self.retention_bytes > 0,
            key="retention_bytes",
            value=self.retention_bytes,
            rule="expected bytes > 0, or nothing: records stay",
        )
        require(
            condition=self.retention_bytes is None or not self.explicit_truncation,
            key="retention_bytes",
            value=self.retention_bytes,
            rule="expected nothing with explicit_truncation=True: only truncated records go then",
        )

    @property
    def tier_url(self) -> str | None:
        """The log's own tier; None: it has none, or wants none."""
        return None if self.tier == NO_TIER else self.tier

    @property
    def needs_visits(self) -> bool:
        """Whether workers look at the log from time to time."""
        lengths = (self.retention_s, self.retention_bytes, self.tier_url)
        return any(each is not None for each in lengths)

    def require_mode(self, log: str, *, proxied: bool) -> None:
        """Raise `LogModeError` if the log's mode forbids a writer of this kind."""
        if self.mode == "proxied" and not proxied:
            raise LogModeError(
                f"log {log!r} has the mode proxied: it is written through proxies (grpc://…, "
                "any client of Arrow Flight) and by atomic appends, unless its mode is changed"
            )
        if self.mode == "direct" and proxied:
            raise LogModeError(
                f"log {log!r} has the mode direct: it is not written through proxies, unless its "
                "mode is changed"
            )

    def changed(self, changes: Mapping[str, object]) -> LogSettings:
        """Return the settings with `changes`, by name; None unsets one.

        Raises:
            ConfigurationError: a setting is unknown, or has a wrong value.
        """
        unset = msgspec.structs.asdict(LogSettings())
        values = {**msgspec.structs.asdict(self), **changes}
        return self.of({k: unset.get(k) if v is None else v for k, v in values.items()})

    @classmethod
    def of(cls, values: Mapping[str, object]) -> LogSettings:
        """Return settings by name.

        Raises:
            ConfigurationError: a setting is unknown, or has a wrong value.
        """
        check_values(cls, values)
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"a log's settings {dict(values)!r}: {error}") from error


SESSION_TIMEOUT_S = 10.0
"""After this long without contact the metadata store removes a client's ephemeral nodes."""
_OVERRIDES = ("entry_bytes", "segment_bytes_max", "segment_age_max_s", "compression", "encrypted")
