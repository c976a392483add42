"""Balance of logs over proxies: events in, effects out, no I/O and no clock of its own.

Theory of operation.  A proxy keeps the logs that it owns when others join.  Therefore, after a
rolling restart, the first proxies own nearly all logs.  The balance corrects this.  Each proxy
publishes its load, and decides by itself what it hands over.  The home of a log is the proxy that
rendezvous hashing chooses for it.  When the live proxies have been the same for `after_s`, a proxy
looks at its logs whose home is another live proxy.  While it has too much, it hands some of them
over in a step, and pauses after each step.

A proxy has too much if it is above the mean of all proxies by more than the share `tolerance`,
either in logs or in bytes written a second.  To reduce its logs, it first hands over logs without
writes.  To reduce its bytes, it hands over the largest log that is not larger than the excess.  A
log goes to its home only if the larger of the two loads does not grow, and if neither logs nor
bytes exceed their limit there because of the other.  A step takes one hundredth of the logs, at
least one, and at most one of them has writes.

Invariants: a log goes to its home only.  Therefore it moves at most once while the live proxies
stay the same, even if proxies have wrong views of each other's load.  No log goes to a proxy that
is not live, publishes no load, or has no room.  A log that a client could not write at its home
stays.  docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

Published loads are old.  Until its new owner may have published a handed-over log, the log is added
to the load that this owner published last.  Therefore no log is handed over because of old news.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias, assert_never

from dlcore.base.machines import Machine, State, Transitions
from dlcore.proxy.load import ProxyLoad

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LOOK_PAUSES = 3
"""Pauses after a look without a hand-over; also the shortest time between two published loads."""
RATE_HALF_LIFE_S = 15.0
RATE_FLOOR = 1024 * 1024
"""An excess of fewer bytes a second is ignored, even if it is a large share of the mean."""
_STEPS = 100
"""A step takes one log of this number."""
_PUBLISHED_LOOKS = 2
"""Looks after which the new owner has published a log that had an open stream."""
_UNUSED_S = 600.0
"""Time for which a log without a stream counts for its new owner.  No client may ever write it, so
that the new owner never acquires it."""
_NOTABLE_SHARE = 10
"""A rate is published again when it has changed by one of this many parts of it, or of the floor if
that is higher."""


class BalanceState(State):
    """The state of the balance; operators see its name."""

    ALONE = "no other proxy is live, or this one is not"
    SETTLING = "the live proxies have changed"
    EVEN = "no log is to be handed over"
    MOVING = "logs were handed over at the last look"


_S = BalanceState
_CHANGED = {_S.ALONE: "no other is live", _S.SETTLING: "the live proxies changed"}
_LOOKED = {_S.EVEN: "nothing to hand over", _S.MOVING: "handed over"}
TRANSITIONS = Transitions(
    _S.ALONE,
    {
        _S.ALONE: {_S.SETTLING: "others are live", **_LOOKED},
        _S.SETTLING: {_S.ALONE: "no other is live", **_LOOKED},
        _S.EVEN: {**_CHANGED, _S.MOVING: "handed over"},
        _S.MOVING: {**_CHANGED, _S.EVEN: "nothing to hand over"},
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedState:
    """A log that the proxy owns; `home` is the proxy that should own it.

    `accepted_bytes` only grows.  `is_open`: the log has an open stream.  `stays`: the log is here
    because a client did not reach its home.
    """

    name: str
    home: str
    accepted_bytes: int
    is_open: bool = False
    stays: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """Event: the live proxies and the own logs, as they are now."""

    now_s: float
    live: frozenset[str]
    logs: Sequence[OwnedState]
    room: int
    changes: int = 0
    """Number of changes of the live proxies: after a restart the set may be the same as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadsRead:
    """Event: the published loads of other proxies; None if one has none (an older release)."""

    now_s: float
    loads: Mapping[str, ProxyLoad | None]


Event: TypeAlias = Looked | LoadsRead


@dataclass(frozen=True, slots=True)
class PublishLoad:
    """Effect: publish this load for the other proxies."""

    load: ProxyLoad


@dataclass(frozen=True, slots=True)
class AskLoads:
    """Effect: read the published loads of these proxies, for a `LoadsRead`."""

    locations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HandOver:
    """Effect: release a log, if `home` is still its home."""

    name: str
    home: str


Effect: TypeAlias = PublishLoad | AskLoads | HandOver


@dataclass(slots=True)
class _Load:
    """A load during the planning of a step."""

    logs: int
    room: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class _Sent:
    """A log that was handed over; until `until_s` its new owner may not have published it."""

    home: str
    until_s: float
    bytes_per_s: float


@dataclass(slots=True)
class _Candidate:
    log: OwnedState
    bytes_per_s: float
    is_written: bool


@dataclass(frozen=True, slots=True)
class _Meter:
    """The bytes a second of one log, as an exponentially weighted mean."""

    accepted_bytes: int = 0
    bytes_per_s: float = 0.0
    is_written: bool = False

    def read(self, accepted_bytes: int, passed_s: float) -> _Meter:
        grown = accepted_bytes - self.accepted_bytes
        if grown < 0:  # the log was released and acquired again
            grown = accepted_bytes
        weight = 1.0 - 0.5 ** (passed_s / RATE_HALF_LIFE_S)
        rate = self.bytes_per_s + (grown / passed_s - self.bytes_per_s) * weight
        return _Meter(accepted_bytes, rate, grown > 0)


@dataclass(frozen=True, slots=True)
class _Limits:
    """The means of all proxies, and the limits above which a proxy has too much."""

    logs_mean: float
    logs_max: float
    bytes_mean: float
    bytes_max: float

    @classmethod
    def of(cls, loads: Sequence[_Load], tolerance: float) -> _Limits:
        logs = sum(each.logs for each in loads) / len(loads)
        rate = sum(each.bytes_per_s for each in loads) / len(loads)
        return cls(
            logs, logs * (1 + tolerance), rate, max(rate * (1 + tolerance), rate + RATE_FLOOR)
        )


@dataclass(frozen=True, slots=True)
class _Pace:
    """How long the live proxies must be the same, and the pause after a step."""

    after_s: float
    pause_s: float

    @property
    def look_s(self) -> float:
        """The pause after a look without a step."""
        return LOOK_PAUSES * self.pause_s


class _LiveProxies:
    """The live proxies, and since when they are the same ones."""

    def __init__(self) -> None:
        self.now: frozenset[str] = frozenset()
        self._changes = 0
        self._since_s = 0.0

    def look(self, event: Looked) -> bool:
        """Take over what is live; return whether that has changed."""
        if event.live == self.now and event.changes == self._changes:
            return False
        self.now, self._changes, self._since_s = event.live, event.changes, event.now_s
        return True

    def same_s(self, now_s: float) -> float:
        """Return the seconds since the last change."""
        return now_s - self._since_s


class _Meters:
    """The rates of the own logs, and their sum."""

    def __init__(self) -> None:
        self.load = _Load(0, 0, 0.0)
        """The own load."""
        self._looked_at_s: float | None = None
        self._meters: dict[str, _Meter] = {}

    def of(self, log: str) -> _Meter:
        """Return the meter of a log that was there at the last look."""
        return self._meters[log]

    def look(self, event: Looked) -> None:
        """Read all meters."""
        before_s, self._looked_at_s = self._looked_at_s, event.now_s
        meters = {}
        for log in event.logs:
            meter = self._meters.get(log.name)
            if meter is None or before_s is None:
                meter = _Meter(log.accepted_bytes)  # the bytes so far have no known duration
            elif event.now_s > before_s:
                meter = meter.read(log.accepted_bytes, event.now_s - before_s)
            meters[log.name] = meter
        self._meters = meters
        rate = sum(each.bytes_per_s for each in meters.values())
        self.load = _Load(len(event.logs), event.room, rate)


class _Publication:
    """The publication of the own load: if it has changed, but not often."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._published: ProxyLoad | None = None
        self._next_s = 0.0

    def publish(self, own: _Load, now_s: float) -> list[Effect]:
        """Publish the load, if that is due."""
        published, rate = self._published, round(own.bytes_per_s)
        if published is not None:
            notable = max(published.bytes_per_s, RATE_FLOOR) / _NOTABLE_SHARE
            is_known = own.logs == published.logs and abs(rate - published.bytes_per_s) < notable
            if is_known or now_s < self._next_s:
                return []
        self._next_s = now_s + self._pause_s
        self._published = ProxyLoad(logs=own.logs, room=max(0, own.room), bytes_per_s=rate)
        return [PublishLoad(self._published)]

    def forget(self) -> None:
        """Publish the load again: there may be none."""
        self._published = None


class _HandedOver:
    """The logs that were handed over, until their new owners have published them."""

    def __init__(self) -> None:
        self._sent: list[_Sent] = []
        self._seen: dict[str, int] = {}  # location -> number of logs in its last load

    def clear(self) -> None:
        """Forget all: other proxies are live now."""
        self._sent.clear()
        self._seen.clear()

    def add(self, sent: _Sent) -> None:
        """Count a log for its new owner from now on."""
        self._sent.append(sent)

    def forget_published(self, published: Mapping[str, ProxyLoad], now_s: float) -> None:
        """Forget logs that were handed over and that their new owner has published since.

        A growth of the new owner's published number accounts for its oldest logs; notes that are
        too old go as well.  If the new owner released other logs meanwhile, its number does not
        grow, and a log counts twice for a while.
        """
        more = {
            location: load.logs - self._seen.get(location, load.logs)
            for location, load in published.items()
        }
        self._seen |= {location: load.logs for location, load in published.items()}
        left = []
        for each in self._sent:
            if more.get(each.home, 0) > 0:
                more[each.home] -= 1
            elif now_s < each.until_s:
                left.append(each)
        self._sent = left

    def counted(self, location: str, published: ProxyLoad) -> _Load:
        """Return the published load of a proxy plus the logs that it may not have published yet."""
        sent = [each.bytes_per_s for each in self._sent if each.home == location]
        return _Load(
            published.logs + len(sent),
            published.room - len(sent),
            published.bytes_per_s + sum(sent),
        )


class Balancer(Machine[BalanceState]):
    """Decides for the proxy at `location` which logs it hands over, and when."""

    transitions = TRANSITIONS

    def __init__(self, location: str, *, after_s: float, pause_s: float, tolerance: float) -> None:
        assert pause_s > 0
        self._location = location
        self._pace = _Pace(after_s, pause_s)
        self._tolerance = tolerance
        self._live = _LiveProxies()
        self._meters = _Meters()
        self._publication = _Publication(self._pace.look_s)
        self._sent = _HandedOver()
        self._candidates: list[_Candidate] = []
        self.state = BalanceState.ALONE
        self.handed_over = 0
        """Number of all logs that it decided to hand over so far."""

    @property
    def misplaced(self) -> int:
        """Number of logs at the last look whose home is another live proxy."""
        return len(self._candidates)

    @property
    def wait_s(self) -> float:
        """Seconds to wait until the next look."""
        is_moving = self.state is BalanceState.MOVING
        return self._pace.pause_s if is_moving else self._pace.look_s

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; return the effects to perform."""
        match event:
            case Looked():
                return self._looked(event)
            case LoadsRead():
                return self._loads_read(event)
            case _:
                assert_never(event)

    def _looked(self, event: Looked) -> list[Effect]:
        if self._live.look(event):
            # The notes are about the loads of proxies that may be gone, or that began again from
            # none.
            self._sent.clear()
        self._meters.look(event)
        self._candidates = [
            _Candidate(log, meter.bytes_per_s, meter.is_written)
            for log in event.logs
            if log.home != self._location and log.home in event.live and not log.stays
            for meter in [self._meters.of(log.name)]
        ]
        others = sorted(event.live - {self._location})
        if self._location not in event.live:  # it has left, and has no node for a load
            self._go_to(BalanceState.ALONE)
            self._publication.forget()
            return []
        published = self._publication.publish(self._meters.load, event.now_s)
        if not others:
            self._go_to(BalanceState.ALONE)
            return published
        if self._live.same_s(event.now_s) < self._pace.after_s:
            self._go_to(BalanceState.SETTLING)
            return published
        if not self._candidates:
            self._go_to(BalanceState.EVEN)
            return published
        return [*published, AskLoads(tuple(others))]

    def _go_to(self, state: BalanceState) -> None:
        if state is not self.state:
            self._become(state)

    def forget_published_load(self) -> None:
        """Publish the load again: the last attempt may have failed."""
        self._publication.forget()

    def _loads_read(self, event: LoadsRead) -> list[Effect]:
        published = {
            location: load
            for location, load in event.loads.items()
            if load is not None and location in self._live.now and location != self._location
        }
        self._sent.forget_published(published, event.now_s)
        loads = {
            location: self._sent.counted(location, load) for location, load in published.items()
        }
        chosen = self._step(loads)
        published_s = _PUBLISHED_LOOKS * self._pace.look_s
        for each in chosen:
            until_s = event.now_s + (
                published_s if each.log.is_open else max(published_s, _UNUSED_S)
            )
            self._sent.add(_Sent(each.log.home, until_s, each.bytes_per_s))
        self.handed_over += len(chosen)
        self._go_to(BalanceState.MOVING if chosen else BalanceState.EVEN)
        return [HandOver(each.log.name, each.log.home) for each in chosen]

    def _step(self, loads: Mapping[str, _Load]) -> list[_Candidate]:
        """Return the logs to hand over now."""
        # A copy, because `_move` changes it while the step is planned, and nothing has moved yet.
        own = replace(self._meters.load)
        limits = _Limits.of([own, *loads.values()], self._tolerance)
        most = max(1, own.logs // _STEPS)
        chosen: dict[str, _Candidate] = {}
        has_written = False
        left = [each for each in self._candidates if each.log.home in loads]
        for each, is_for_bytes in chain(
            ((each, False) for each in _quietest_first(left, loads)),
            ((each, True) for each in _fitting_first(left, own.bytes_per_s - limits.bytes_mean)),
        ):
            if len(chosen) == most:
                break
            target = loads[each.log.home]
            if each.log.name in chosen or (each.is_written and has_written):
                continue
            if _helps(own, target, each.bytes_per_s, limits, for_bytes=is_for_bytes):
                chosen[each.log.name] = each
                has_written |= each.is_written
                _move(own, target, each.bytes_per_s)
        return list(chosen.values())

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        homes = {each.log.home for each in self._candidates}
        assert self._location not in homes
        assert homes <= self._live.now
        assert self.state is not BalanceState.MOVING or self._candidates


def _quietest_first(
    candidates: Iterable[_Candidate], loads: Mapping[str, _Load]
) -> list[_Candidate]:
    """Return candidates, those without writes and streams first, then by their home's logs."""
    return sorted(
        candidates,
        key=lambda each: (
            each.is_written,
            each.log.is_open,
            loads[each.log.home].logs,
            each.bytes_per_s,
        ),
    )


def _fitting_first(candidates: Iterable[_Candidate], excess: float) -> list[_Candidate]:
    """Return candidates within the excess, the largest first, then others, the smallest first."""
    return sorted(
        candidates,
        key=lambda each: (
            each.bytes_per_s > excess,
            each.bytes_per_s if each.bytes_per_s > excess else -each.bytes_per_s,
        ),
    )


def _helps(own: _Load, target: _Load, rate: float, limits: _Limits, *, for_bytes: bool) -> bool:
    """Return whether a log of this rate should go, to reduce bytes or the number of logs."""
    if target.room < 1:
        return False
    if for_bytes:
        return (
            own.bytes_per_s > limits.bytes_max
            and target.bytes_per_s + rate < own.bytes_per_s
            and target.logs + 1 <= max(limits.logs_max, limits.logs_mean + 1, own.logs - 1)
        )
    # Near the mean, a move that only swaps the numbers of the two proxies would be useless.
    return (
        own.logs > limits.logs_max
        and target.logs + 1 <= own.logs - (own.logs < limits.logs_mean + 1)
        and target.bytes_per_s + rate <= max(limits.bytes_max, own.bytes_per_s - rate)
    )


def _move(own: _Load, target: _Load, rate: float) -> None:
    own.logs, own.bytes_per_s = own.logs - 1, own.bytes_per_s - rate
    target.logs, target.room = target.logs + 1, target.room - 1
    target.bytes_per_s += rate
