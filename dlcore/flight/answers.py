"""The answers of a proxy's actions, each a JSON object in the Result of Flight."""

from __future__ import annotations

import msgspec

from dlcore.base.config import LogSettings
from dlcore.flight.planning import FoundPlace
from dlcore.flight.requests import SeenPosition
from dlcore.log.entries.stamp import Claim
from dlcore.log.metadata.values import Mark


class NoAnswer(msgspec.Struct, frozen=True):
    """The action is done, and there is nothing to tell."""


class BegunProducer(msgspec.Struct, frozen=True):
    """A new incarnation of a producer, and the number of its next record."""

    producer: Claim
    sequence: int


class CommittedAppend(msgspec.Struct, frozen=True):
    """Whether an earlier call had committed the append."""

    already_committed: bool


class FoundPlaces(msgspec.Struct, frozen=True):
    """The place of each record that was searched for, in the order of the searches."""

    places: list[FoundPlace]


class AccessRules(msgspec.Struct, frozen=True):
    """The rules of access, as texts, after the change."""

    rules: list[str]


class LivingProxies(msgspec.Struct, frozen=True):
    """The locations of the live proxies, sorted."""

    locations: list[str]


class LogOwner(msgspec.Struct, frozen=True):
    """The proxy that owns a log, or that should; `log_id` is null if there is no such log.

    `location` is null if no proxy is alive.
    """

    location: str | None
    log_id: str | None


class LogPositions(msgspec.Struct, frozen=True):
    """The first and the last record of a log, its end, and the places that were asked for.

    `first` and `last` are null if the log holds no record.
    """

    log_id: str
    first: FoundPlace | None
    last: FoundPlace | None
    end: FoundPlace
    positions: list[FoundPlace]


class LogSchemas(msgspec.Struct, frozen=True):
    """The schema of each existing log as an Arrow message; null for a log of bytes.

    `sealed` names those that take no more records, if the caller writes; proxies before 0.3.0 do
    not tell.
    """

    schemas: dict[str, bytes | None]
    sealed: list[str] = []


class LogSnapshots(msgspec.Struct, frozen=True):
    """Snapshots of the existing logs, packed for clients of this release."""

    snapshots: bytes


class MovedSubscription(msgspec.Struct, frozen=True):
    """The state of a subscription after it was moved."""

    mark: Mark


class OwnedLogs(msgspec.Struct, frozen=True):
    """The names of the logs that a proxy owns."""

    logs: list[str]


class ProxyHealth(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether a proxy takes logs, how many it owns, and the state of its balance.

    `degraded` says since when it has no connection to the metadata store; otherwise it is absent.
    `expires_at_ms` is there with TLS: when the first certificate of its port expires.
    `clock_ms` is its clock; earlier releases do not tell it.
    """

    location: str
    serves: bool
    logs: int
    balance: dict[str, object]
    degraded: str | None = None
    expires_at_ms: int | None = None
    clock_ms: int | None = None


class ReleasedLog(msgspec.Struct, frozen=True):
    """Whether the proxy owned the log."""

    released: bool


class ForkedLog(msgspec.Struct, frozen=True):
    """The position where the records of the source end in the fork."""

    at: str


class SettingsOfLog(msgspec.Struct, frozen=True):
    """The settings of a log that are set, after the change."""

    settings: LogSettings


class StreamEnd(msgspec.Struct, frozen=True):
    """The end of a stream of bytes, in bytes from its start, and whether it is sealed."""

    position: int
    sealed: bool


class Subscriptions(msgspec.Struct, frozen=True):
    """The stored positions of a log, by subscriber."""

    subscriptions: dict[str, SeenPosition]


class TruncatedLog(msgspec.Struct, frozen=True):
    """Whether the action dropped any record."""

    truncated: bool
