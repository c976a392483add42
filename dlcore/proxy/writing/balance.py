"""Balance of logs over proxies: events in, effects out, no I/O and no clock of its own.

Theory of operation.  A proxy keeps the logs that it owns when others join, so that after a rolling
restart the first ones own nearly all.  Each proxy tells the others its load, and hands over by
itself: when the live proxies have been the same for `after_s` it looks at those of its logs whose
home, the proxy that hashing names for them, is another live one.  It hands some of them over as
long as it has too much itself, in a step that is followed by a pause.

Too much is more than the mean of all proxies and `tolerance` of it, either of logs or of bytes
written a second.  For the count of logs those go first that nobody writes.  For the bytes the
largest log goes that fits into what is too much.  A log goes only where it does not make the larger
of the two loads larger, and where it brings neither count nor bytes above the limit for the sake of
the other.  A proxy that then has too much hands over in its turn.  A step takes one hundredth of
the logs, at least one, and among them at most one that is being written.

    no other proxy: ALONE    others: SETTLING --the same for after_s--> EVEN <--> MOVING
    any state --the live proxies change--> SETTLING or ALONE

Invariants: a log goes to its home only, so that it moves at most once while the live proxies stay
the same, whatever several owners believe of each other's load; nothing goes to a proxy that is not
live, tells no load, or has no room.  A log that a client could not write at its home stays.

What others told is old.  A log that was handed over counts for its new owner beside what this one
told last, for as long as it may not have told of it: so nothing is handed over for want of news.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias, assert_never

from dlcore.proxy.load import ProxyLoad

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LOOK_PAUSES = 3
"""A look that finds nothing to hand over is followed by so many pauses; loads are told as often."""
RATE_HALF_LIFE_S = 15.0
RATE_FLOOR = 1024 * 1024
"""Bytes a second above the mean that are left alone, whatever share of it they are."""
_STEPS = 100
"""A step takes one of so many logs."""
_TOLD_LOOKS = 2
"""After so many looks its new owner has told of a log to which a stream was open."""
_UNUSED_S = 600.0
"""For so long another one counts for its new owner, though nobody may write it, so that it is
nobody's by then."""
_TELLING_SHARE = 10
"""A rate is told anew when it has changed by one of so many parts, and by that of the floor."""


class BalanceState(enum.Enum):
    """How far the balance is, for people."""

    ALONE = "alone"
    SETTLING = "settling"
    MOVING = "moving"
    EVEN = "even"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedState:
    """A log that the proxy owns: `home` is who should own it, `accepted_bytes` only grows.

    `is_open`: a stream is open to it.  `stays`: it is here because its home was not reached.
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
    """How often the live proxies have changed: one that restarted may be among them as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadsTold:
    """Event: what the other proxies tell; None: nothing, as an older release does."""

    now_s: float
    loads: Mapping[str, ProxyLoad | None]


Event: TypeAlias = Looked | LoadsTold


@dataclass(frozen=True, slots=True)
class TellLoad:
    """Effect: let the others know this load."""

    load: ProxyLoad


@dataclass(frozen=True, slots=True)
class AskLoads:
    """Effect: find out what these proxies tell, for a `LoadsTold`."""

    locations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HandOver:
    """Effect: let go of a log, if this is still its home."""

    name: str
    home: str


Effect: TypeAlias = TellLoad | AskLoads | HandOver


@dataclass(slots=True)
class _Load:
    """A load while a step is put together."""

    logs: int
    room: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class _Sent:
    """A log that was handed over, and until when its new owner may not have told of it."""

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
    """The bytes a second of one log, as a mean in which old times count less and less."""

    accepted_bytes: int = 0
    bytes_per_s: float = 0.0
    is_written: bool = False

    def read(self, accepted_bytes: int, passed_s: float) -> _Meter:
        grown = accepted_bytes - self.accepted_bytes
        if grown < 0:  # it was let go of and acquired again
            grown = accepted_bytes
        weight = 1.0 - 0.5 ** (passed_s / RATE_HALF_LIFE_S)
        rate = self.bytes_per_s + (grown / passed_s - self.bytes_per_s) * weight
        return _Meter(accepted_bytes, rate, grown > 0)


@dataclass(frozen=True, slots=True)
class _Limits:
    """What is too much."""

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


class Balancer:
    """Decides for the proxy at `location` what it hands over, and when."""

    def __init__(self, location: str, *, after_s: float, pause_s: float, tolerance: float) -> None:
        assert pause_s > 0
        self._location = location
        self._after_s = after_s
        self._pause_s = pause_s
        self._tolerance = tolerance
        self._live: frozenset[str] = frozenset()
        self._changes = 0
        self._since_s = 0.0
        self._looked_at_s: float | None = None
        self._meters: dict[str, _Meter] = {}
        self._own = _Load(0, 0, 0.0)
        self._candidates: list[_Candidate] = []
        self._told: ProxyLoad | None = None
        self._tells_at_s = 0.0
        self._sent: list[_Sent] = []
        self._seen: dict[str, int] = {}  # how many logs each told last
        self.state = BalanceState.ALONE
        self.handed_over = 0
        """How many logs it has decided to hand over, ever."""

    @property
    def misplaced(self) -> int:
        """How many of the logs would be handed over, if there were too many, at the last look."""
        return len(self._candidates)

    @property
    def wait_s(self) -> float:
        """How long to wait until the next look."""
        return self._pause_s * (1 if self.state is BalanceState.MOVING else LOOK_PAUSES)

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; return what is to be done."""
        match event:
            case Looked():
                return self._looked(event)
            case LoadsTold():
                return self._loads_told(event)
            case _:
                assert_never(event)

    def _looked(self, event: Looked) -> list[Effect]:
        if event.live != self._live or event.changes != self._changes:
            self._live, self._changes, self._since_s = event.live, event.changes, event.now_s
            self._sent.clear()
            self._seen.clear()
        self._measure(event)
        self._candidates = [
            _Candidate(log, meter.bytes_per_s, meter.is_written)
            for log in event.logs
            if log.home != self._location and log.home in event.live and not log.stays
            for meter in [self._meters[log.name]]
        ]
        others = sorted(event.live - {self._location})
        if self._location not in event.live:  # it has left, and has no node to tell anything
            self.state, self._told = BalanceState.ALONE, None
            return []
        if not others:
            self.state = BalanceState.ALONE
            return self._tell(event.now_s)
        if event.now_s - self._since_s < self._after_s:
            self.state = BalanceState.SETTLING
            return self._tell(event.now_s)
        if not self._candidates:
            self.state = BalanceState.EVEN
            return self._tell(event.now_s)
        return [*self._tell(event.now_s), AskLoads(tuple(others))]

    def _measure(self, event: Looked) -> None:
        before_s, self._looked_at_s = self._looked_at_s, event.now_s
        meters = {}
        for log in event.logs:
            meter = self._meters.get(log.name)
            if meter is None or before_s is None:
                meter = _Meter(log.accepted_bytes)  # for how long it came is not known
            elif event.now_s > before_s:
                meter = meter.read(log.accepted_bytes, event.now_s - before_s)
            meters[log.name] = meter
        self._meters = meters
        rate = sum(each.bytes_per_s for each in meters.values())
        self._own = _Load(len(event.logs), event.room, rate)

    def _tell(self, now_s: float) -> list[Effect]:
        """Tell the own load if it has changed, seldom."""
        own, told = self._own, self._told
        rate = round(own.bytes_per_s)
        if told is not None:
            notable = max(told.bytes_per_s, RATE_FLOOR) / _TELLING_SHARE
            is_known = own.logs == told.logs and abs(rate - told.bytes_per_s) < notable
            if is_known or now_s < self._tells_at_s:
                return []
        self._tells_at_s = now_s + LOOK_PAUSES * self._pause_s
        self._told = ProxyLoad(logs=own.logs, room=max(0, own.room), bytes_per_s=rate)
        return [TellLoad(self._told)]

    def forget_told(self) -> None:
        """Tell the load again: the others may not know it."""
        self._told = None

    def _loads_told(self, event: LoadsTold) -> list[Effect]:
        told = {
            location: load
            for location, load in event.loads.items()
            if load is not None and location in self._live and location != self._location
        }
        self._forget_told_of(told, event.now_s)
        loads = {location: self._counted(location, load) for location, load in told.items()}
        chosen = self._step(loads)
        told_s = _TOLD_LOOKS * LOOK_PAUSES * self._pause_s
        for each in chosen:
            until_s = event.now_s + (told_s if each.log.is_open else max(told_s, _UNUSED_S))
            self._sent.append(_Sent(each.log.home, until_s, each.bytes_per_s))
        self.handed_over += len(chosen)
        self.state = BalanceState.MOVING if chosen else BalanceState.EVEN
        return [HandOver(each.log.name, each.log.home) for each in chosen]

    def _forget_told_of(self, told: Mapping[str, ProxyLoad], now_s: float) -> None:
        """Forget what was handed over to those who own more since, the oldest first, and old ones.

        Who let go of others meanwhile owns no more: of what he got some counts twice for a while.
        """
        more = {
            location: load.logs - self._seen.get(location, load.logs)
            for location, load in told.items()
        }
        self._seen |= {location: load.logs for location, load in told.items()}
        left = []
        for each in self._sent:
            if more.get(each.home, 0) > 0:
                more[each.home] -= 1
            elif now_s < each.until_s:
                left.append(each)
        self._sent = left

    def _counted(self, location: str, told: ProxyLoad) -> _Load:
        """Return what a proxy told with what it may not have told yet."""
        sent = [each.bytes_per_s for each in self._sent if each.home == location]
        return _Load(told.logs + len(sent), told.room - len(sent), told.bytes_per_s + sum(sent))

    def _step(self, loads: Mapping[str, _Load]) -> list[_Candidate]:
        """Return what is handed over now."""
        own = replace(self._own)
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


def _quietest_first(
    candidates: Iterable[_Candidate], loads: Mapping[str, _Load]
) -> list[_Candidate]:
    """Return those first whose move nobody notices, of them those whose homes have the fewest."""
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
    """Return the largest first of those that are no more than what is too much, then the others."""
    return sorted(
        candidates,
        key=lambda each: (
            each.bytes_per_s > excess,
            each.bytes_per_s if each.bytes_per_s > excess else -each.bytes_per_s,
        ),
    )


def _helps(own: _Load, target: _Load, rate: float, limits: _Limits, *, for_bytes: bool) -> bool:
    """Return whether a log of this rate should go, for the sake of the bytes or of the count."""
    if target.room < 1:
        return False
    if for_bytes:
        return (
            own.bytes_per_s > limits.bytes_max
            and target.bytes_per_s + rate < own.bytes_per_s
            and target.logs + 1 <= max(limits.logs_max, limits.logs_mean + 1, own.logs - 1)
        )
    return (
        own.logs > limits.logs_max
        and target.logs + 1 <= own.logs - (own.logs < limits.logs_mean + 1)
        and target.bytes_per_s + rate <= max(limits.bytes_max, own.bytes_per_s - rate)
    )


def _move(own: _Load, target: _Load, rate: float) -> None:
    own.logs, own.bytes_per_s = own.logs - 1, own.bytes_per_s - rate
    target.logs, target.room = target.logs + 1, target.room - 1
    target.bytes_per_s += rate
