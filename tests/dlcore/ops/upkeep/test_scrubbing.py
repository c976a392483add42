"""The machine that decides which cold object is read next, and when: no I/O."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlcore.ops.autorecovery.values import ScrubProgress
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.scrubbing import (
    COUNT_AGAIN_MS,
    TRIES_MAX,
    Begin,
    Count,
    Counted,
    Effect,
    End,
    Event,
    Examine,
    Examined,
    Find,
    Found,
    ListLedger,
    NoneAhead,
    ScrubRound,
    ScrubState,
    Signal,
    Verdict,
)

DAY_MS = 24 * 3600 * 1000
START_MS = 1_700_000_000_000
CONFIG = UpkeepConfig(scrub_period_s=30 * 24 * 3600, scrub_bytes_per_s=1000, scrub_interval_s=60)
WHOLE, DAMAGED, UNKNOWN = Verdict.WHOLE, Verdict.DAMAGED, Verdict.UNKNOWN


class Round:
    """A machine that is checked after each event."""

    def __init__(self, progress: ScrubProgress | None, config: UpkeepConfig = CONFIG) -> None:
        self.machine = ScrubRound(progress, config)

    def handle(self, event: Event) -> Effect:
        """Feed an event."""
        effect = self.machine.handle(event)
        self.machine.validate()
        return effect

    def ended(self, effect: Effect) -> ScrubProgress:
        """Require that the round has ended; return its progress."""
        assert isinstance(effect, End)
        assert self.machine.state is ScrubState.ENDED
        return effect.progress


class Tier:
    """Objects of so many bytes by ledger, and rounds over them, one a minute."""

    def __init__(self, sizes: dict[int, list[int]], config: UpkeepConfig = CONFIG) -> None:
        self.sizes = sizes
        self.config = config
        self.now_ms = START_MS
        self.progress: ScrubProgress | None = None
        self.read: list[tuple[int, int, int]] = []
        self.counts = 0

    def run(self, *, until_ms: int, step_ms: int = 60_000) -> None:
        """Run rounds until a time; reading takes no time."""
        while self.now_ms < until_ms:
            self.round()
            self.now_ms += step_ms

    def round(self) -> None:
        """Run one round."""
        work = Round(self.progress, self.config)
        effect = work.handle(Begin(self.now_ms))
        while not isinstance(effect, End):
            effect = work.handle(self.answer_of(effect))
        self.progress = effect.progress

    def ahead(self, ledger_id: int, number: int) -> list[tuple[int, int, int]]:
        """Return the objects from a place on, with their sizes."""
        every = [
            (each, n, s) for each in sorted(self.sizes) for n, s in enumerate(self.sizes[each])
        ]
        return [each for each in every if each[:2] >= (ledger_id, number)]

    def answer_of(self, effect: Effect) -> Event:
        """Return what is there."""
        match effect:
            case Count(ledger_id, number):
                self.counts += 1
                return Counted(sum(each[2] for each in self.ahead(ledger_id, number)), self.now_ms)
            case Find(ledger_id, number):
                found = self.ahead(ledger_id, number)
                return Found(*found[0]) if found else NoneAhead()
            case Examine(ledger_id, number):
                self.read.append((self.now_ms, ledger_id, number))
                return Examined(WHOLE, self.now_ms)
            case _:
                raise AssertionError(effect)


def test_a_pass_reads_all_once_in_its_period_at_an_even_pace() -> None:
    """A thirtieth each day; the next pass begins when the period is over."""
    tier = Tier({each: [10, 20] for each in range(1, 301)})
    for day in range(1, 31):
        tier.run(until_ms=START_MS + day * DAY_MS)
        assert abs(len(tier.read) - 20 * day) <= 2
    assert [each[1:] for each in tier.read] == [each[:2] for each in tier.ahead(0, 0)]
    assert tier.counts <= 31
    assert tier.progress is not None
    assert (tier.progress.objects, tier.progress.read_bytes) == (600, 9000)
    tier.run(until_ms=START_MS + 31 * DAY_MS)
    assert [each[1:] for each in tier.read[600:603]] == [(1, 0), (1, 1), (2, 0)]


def test_a_segment_that_becomes_cold_meanwhile_is_read_in_the_same_pass() -> None:
    """Also if one object alone was there before, whose pause would be long."""
    tier = Tier({1: [10]})
    tier.run(until_ms=START_MS + DAY_MS)
    tier.sizes |= {each: [10] for each in range(2, 202)}
    tier.run(until_ms=START_MS + 30 * DAY_MS)
    assert [each[1] for each in tier.read] == [*range(1, 202)]
    middle = tier.read[101][0] - START_MS
    assert 14 * DAY_MS < middle < 17 * DAY_MS


def test_more_than_the_bound_takes_longer_than_the_period() -> None:
    """1,000 bytes a second, and no more, also after days without a worker; then all is read."""
    tier = Tier({each: [100_000] for each in range(1, 101)}, replace_period(1))
    tier.run(until_ms=START_MS + 3_600_000)
    assert 35 <= len(tier.read) <= 38
    tier.now_ms += 2 * DAY_MS
    tier.run(until_ms=tier.now_ms + 600_000)
    assert 41 <= len(tier.read) <= 46
    tier.run(until_ms=tier.now_ms + 6_600_000)
    assert [each[1] for each in tier.read[:101]] == [*range(1, 101), 1]


def replace_period(seconds: float) -> UpkeepConfig:
    """Return the configuration with another period."""
    return UpkeepConfig(scrub_period_s=seconds, scrub_bytes_per_s=1000, scrub_interval_s=60)


def test_nothing_cold() -> None:
    """A round costs nothing; each day it is counted whether there is something."""
    tier = Tier({})
    tier.run(until_ms=START_MS + 5 * DAY_MS)
    assert tier.counts == 5
    assert not tier.read


def begun(*, left_bytes: int = 1000, **values: int) -> ScrubProgress:
    """Return the progress of a pass that began at the start, with something due then."""
    return replace(
        ScrubProgress(
            started_ms=START_MS, due_ms=START_MS, counted_ms=START_MS, left_bytes=left_bytes
        ),
        **values,
    )


def test_damage_is_reported_and_the_pass_goes_on() -> None:
    """The place is behind it."""
    work = Round(begun())
    assert work.handle(Begin(START_MS)) == Find(0, 0)
    assert work.handle(Found(4, 1, 10)) == Examine(4, 1)
    assert work.handle(Examined(DAMAGED, START_MS)) == ListLedger(4)
    progress = work.ended(work.handle(Signal.LISTED))
    assert (progress.ledger_id, progress.number, progress.damaged) == (4, 2, 1)
    assert (progress.objects, progress.read_bytes, progress.left_bytes) == (1, 10, 990)
    work = Round(replace(progress, due_ms=START_MS))
    assert work.handle(Begin(START_MS)) == Find(4, 2)


def test_an_unreadable_object_is_tried_again_then_skipped() -> None:
    """A store that is away stops the pass; one object that never answers does not."""
    progress = begun()
    for tries in range(1, TRIES_MAX):
        work = Round(progress)
        assert work.handle(Begin(START_MS)) == Find(progress.ledger_id, progress.number)
        work.handle(Found(4, 1, 10))
        progress = work.ended(work.handle(Examined(UNKNOWN, START_MS)))
        assert (progress.ledger_id, progress.number, progress.tries) == (4, 1, tries)
        assert progress.left_bytes == 1000
    work = Round(progress)
    work.handle(Begin(START_MS))
    work.handle(Found(4, 1, 10))
    progress = work.ended(work.handle(Examined(UNKNOWN, START_MS)))
    assert (progress.number, progress.tries, progress.skipped) == (2, 0, 1)
    assert (progress.objects, progress.read_bytes, progress.left_bytes) == (0, 0, 990)


def test_a_round_ends_when_it_was_long_enough() -> None:
    """The next one may be another worker's."""
    work = Round(begun(left_bytes=10**9))
    now_ms, count = START_MS, 0
    effect = work.handle(Begin(now_ms))
    while not isinstance(effect, End):
        assert isinstance(effect, Find)
        work.handle(Found(4, count, 1))
        now_ms, count = now_ms + 7_000, count + 1
        effect = work.handle(Examined(WHOLE, now_ms))
    assert count == 9


@pytest.mark.parametrize(
    ("progress", "now_ms"),
    [
        (None, START_MS),
        (begun(left_bytes=0, ledger_id=9), START_MS + 30 * DAY_MS),
        (begun(ledger_id=9), START_MS - 1),
    ],
)
def test_a_pass_begins(progress: ScrubProgress | None, now_ms: int) -> None:
    """The first one, one after another, and one after a clock that was ahead."""
    work = Round(progress)
    assert work.handle(Begin(now_ms)) == Count(0, 0)
    assert work.handle(Counted(5, now_ms)) == Find(0, 0)
    assert work.machine.progress.started_ms == now_ms


@pytest.mark.parametrize(
    ("progress", "later_ms", "effect"),
    [
        (begun(ledger_id=9, number=2), COUNT_AGAIN_MS, Count(9, 2)),
        (begun(ledger_id=9, number=2), COUNT_AGAIN_MS - 1, Find(9, 2)),
        (begun(ledger_id=9, counted_ms=START_MS + 10 * DAY_MS), 5, Count(9, 0)),
        (begun(due_ms=START_MS + 6), 5, None),
        (begun(left_bytes=0), 5, None),
        (begun(counted_ms=START_MS + 30 * DAY_MS), 30 * DAY_MS, Find(0, 0)),
    ],
)
def test_the_first_step(progress: ScrubProgress, later_ms: int, effect: Effect | None) -> None:
    """A count if the last one is old; nothing while nothing is due; a late pass goes on."""
    found = Round(progress).handle(Begin(START_MS + later_ms))
    assert found == (End(progress) if effect is None else effect)


def test_all_ahead_is_gone() -> None:
    """Nothing is left, until it is counted again."""
    work = Round(begun())
    work.handle(Begin(START_MS))
    assert work.ended(work.handle(NoneAhead())).left_bytes == 0
