"""Decides which logs a worker looks at in a round of tiering, and what is due there.  No I/O.

Theory of operation.  A segment is due once its last record is old enough, or once the log has more
than some newer bytes on bookies.  The end of a segment says both, and never changes but by merges
and tiering.  Therefore a look at a log tells when the next one can find anything: when the first
segment that is not cold gets old, or the one in progress might, which is as old as its beginning.
Until then the log is not looked at again, but at least every `LOOK_AGAIN_S`, because its settings
may change.  Logs that are not listed any more are forgotten, so that what is kept is bounded by the
logs that there are.

A log whose segments wait for less than the time between two rounds is also looked at in between: an
early round lists nothing, and leaves the times of the next looks as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dlcore.log.upkeep.retention import last_write_ms

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dlcore.base.config import LogSettings
    from dlcore.log.metadata.values import LogHead, LogKey, SegmentEnd
    from dlcore.ops.upkeep.config import UpkeepConfig

LOOK_AGAIN_S = 600.0
"""A log that has a tier is looked at so often at least."""


class TierRule(NamedTuple):
    """Where old segments of a log go, and when; without `after_bytes` their age alone counts."""

    url: str
    after_s: float
    after_bytes: int | None


def rule_of(settings: LogSettings, config: UpkeepConfig) -> TierRule | None:
    """Return the rule by which a log's segments are tiered, its own or the namespace's; None: none.

    An encrypted log stays on bookies whatever the namespace says.
    """
    url = settings.tier_url
    if settings.tier is None and not settings.encrypted:
        url = config.tier or None
    if url is None:
        return None
    after_s = config.tier_after_s if settings.tier_after_s is None else settings.tier_after_s
    return TierRule(url, after_s, settings.tier_after_bytes)


class Look(NamedTuple):
    """The result of a look at a log.

    Attributes:
        lssn: the first segment that is due; None if none is.
        done: all segments below are cold, or stay for good.
        next_ms: before this time a look finds nothing new.
    """

    lssn: int | None
    done: int
    next_ms: int


def look_at(
    head: LogHead,
    ends: Sequence[tuple[int, SegmentEnd | None]],
    rule: TierRule,
    *,
    settled: Collection[int],
    now_ms: int,
) -> Look:
    """Return what is due in a log.

    The segment with the last stamps of producers stays: a new owner of the log reads them.  One
    that is truncated, as a whole or in part, stays too: more of it may go soon.

    Args:
        head: the log's head.
        ends: its completed segments in order, all from the first that is not known to be cold;
            None: it is being removed.
        rule: when segments are due.
        settled: segments that are cold, or that no object can hold.
        now_ms: the time.
    """
    after_ms = int(rule.after_s * 1000)
    segment = head.segment
    begun_ms = now_ms if segment is None else segment.created_ms
    next_ms = min(now_ms + int(LOOK_AGAIN_S * 1000), begun_ms + after_ms)
    if rule.after_bytes is not None:
        next_ms = now_ms  # it depends on what is written meanwhile
    newer = (0 if segment is None else segment.size_bytes) + sum(
        _bytes_on_bookies(end) for _, end in ends
    )
    done = ends[0][0] if ends else 0
    for lssn, end in ends:
        if end is None:
            next_ms = now_ms  # or an old view has not seen it yet
            continue
        if lssn in settled or _is_cold(end):
            done = lssn + 1 if done == lssn else done
            continue
        newer -= _bytes_on_bookies(end)
        if lssn == head.producers_lssn or (lssn, 0, 0) < head.first_active:
            continue
        due_ms = last_write_ms(end) + after_ms
        if due_ms <= now_ms or (rule.after_bytes is not None and newer >= rule.after_bytes):
            return Look(lssn, done, now_ms)
        next_ms = min(next_ms, due_ms)
    return Look(None, done, max(next_ms, now_ms))


def _is_cold(end: SegmentEnd) -> bool:
    return end.chunk_count == 0 and all(each.is_cold for each in end.tail)


def _bytes_on_bookies(end: SegmentEnd | None) -> int:
    if end is None:
        return 0
    return end.chunked.size_bytes + sum(each.size_bytes for each in end.tail if not each.is_cold)


@dataclass(slots=True)
class LogVisits:
    """The knowledge that a worker has of one log's segments."""

    done: int = 1
    """All segments below are cold, or gone, or stay for good."""
    settled: set[int] = field(default_factory=set)
    """Segments from `done` on that are cold, or that no object can hold."""

    def advance(self, done: int) -> None:
        """Take over that all segments below one are done."""
        self.done = max(self.done, done)
        self.settled = {lssn for lssn in self.settled if lssn >= self.done}


@dataclass(slots=True)
class _Listed:
    log: LogKey
    round: int
    next_ms: int = 0
    after_s: float = math.inf


class TierVisits:
    """The logs that may have a tier, by the nodes that list them, and when each is looked at."""

    def __init__(self) -> None:
        self._round = 0
        self._logs: dict[str, _Listed] = {}

    def begin(self) -> None:
        """Begin a round: all logs that there are will be listed."""
        self._round += 1

    def listed(self, nodes: Iterable[str]) -> list[str]:
        """Take some nodes of the list; return those that are not known."""
        unknown = []
        for node in nodes:
            known = self._logs.get(node)
            if known is None:
                unknown.append(node)
            else:
                known.round = self._round
        return unknown

    def add(self, node: str, log: LogKey) -> None:
        """Take the log of a node that was not known."""
        self._logs[node] = _Listed(log, self._round)

    def end(self) -> set[str]:
        """Forget the logs that were not listed in this round; return the ids of the others."""
        self._logs = {k: each for k, each in self._logs.items() if each.round == self._round}
        return {each.log.log_id for each in self._logs.values()}

    def due(self, now_ms: int) -> list[tuple[str, LogKey]]:
        """Return the logs to look at now, with their nodes."""
        return [(node, each.log) for node, each in self._logs.items() if each.next_ms <= now_ms]

    def due_below(self, after_s: float, now_ms: int) -> list[tuple[str, LogKey]]:
        """Return those of `due` whose segments wait for less than this time."""
        return [(node, log) for node, log in self.due(now_ms) if self._logs[node].after_s < after_s]

    def looked(self, node: str, *, next_ms: int) -> None:
        """Note that a look before this time finds nothing."""
        self._logs[node].next_ms = next_ms

    def waits(self, node: str, after_s: float) -> None:
        """Note how long segments of a log wait."""
        self._logs[node].after_s = after_s

    def come_last(self, node: str) -> None:
        """Return a log after all others that are due, from the next time on."""
        known = self._logs.pop(node, None)
        if known is not None:
            self._logs[node] = known

    def forget(self, node: str) -> None:
        """Read a node again in the next round: its log is not what it was."""
        del self._logs[node]
