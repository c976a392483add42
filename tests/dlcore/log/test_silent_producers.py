"""Producers that are silent: only what one wrote keeps it known, by the time at which it wrote.

Each case has two sides: a millisecond before its time a producer is known, and at its time it is
not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.ids import DLSN
from dlcore.log.entries.stamp import KEPT_MS, PRODUCERS_KEPT_MS, decode_stamp
from dlcore.log.proxied.producers import (
    GENERATED_FORGOTTEN_MS,
    InFlight,
)
from dlcore.log.writing.port import MarkedRows
from tests.dlcore.log.test_producers import Owner
from tests.fixtures.durable import durable_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.log.entries.stamp import Claim

HALF_MS = PRODUCERS_KEPT_MS // 2


def known_to(before: Owner, *, at_ms: int) -> list[str]:
    """Return whom a next owner knows, once it has written its first entry at that time."""
    after = before.successor()
    after.now_ms = at_ms
    stamp = after.entry()
    assert stamp is not None
    return sorted(row.name for row in stamp.rows or ())


@pytest.mark.parametrize(("name", "kept_ms"), [("p", PRODUCERS_KEPT_MS), ("_p", 3600 * 1000)])
def test_a_producer_that_wrote_is_known_until_its_time(name: str, kept_ms: int) -> None:
    """A name of its own is kept for seven days, one that was made for one writer for an hour."""
    owner = Owner()
    owner.write(owner.grant(name), 0, 1)
    assert known_to(owner, at_ms=kept_ms - 1) == [name]
    assert known_to(owner, at_ms=kept_ms) == []
    assert (PRODUCERS_KEPT_MS, GENERATED_FORGOTTEN_MS) == (7 * 24 * 3600 * 1000, 3600 * 1000)


def granted(owner: Owner, claim: Claim) -> Owner:
    """Let the producer begin an incarnation that writes nothing."""
    owner.grant(claim.name, 7)
    return owner


def continued(owner: Owner, claim: Claim) -> Owner:
    """Let the incarnation open another stream and write nothing."""
    owner.producers.continue_with(claim, now_ms=owner.now_ms)
    return owner


def sent_again(owner: Owner, claim: Claim) -> Owner:
    """Let the incarnation send again what is durable."""
    owner.producers.look_at(claim, 0, 1)
    return owner


def moved(owner: Owner, claim: Claim) -> Owner:
    """Give the log to another owner, whose first entry lists the producer."""
    after = owner.successor()
    after.write(after.grant(f"beside {claim.name}"), 0, 1)
    return after


@pytest.mark.parametrize("happens", [granted, continued, sent_again, moved])
def test_only_what_a_producer_writes_keeps_it(happens: Callable[[Owner, Claim], Owner]) -> None:
    """Whatever else happens half a week after it wrote."""
    owner = Owner()
    claim = owner.grant("p")
    owner.write(claim, 0, 1)
    owner.now_ms = HALF_MS
    owner = happens(owner, claim)
    owner.lssn, owner.entries = owner.lssn + 1, []
    owner.entry()  # which lists what the owner knows
    assert "p" in known_to(owner, at_ms=PRODUCERS_KEPT_MS - 1)
    assert "p" not in known_to(owner, at_ms=PRODUCERS_KEPT_MS)


def test_the_last_entry_of_a_producer_counts_and_not_the_newest_list() -> None:
    """The list is of an earlier entry; the next owner takes the time from the entry behind it."""
    owner = Owner()
    claim = owner.grant("p")
    owner.write(claim, 0, 1)
    owner.now_ms = HALF_MS
    assert owner.write(claim, 1, 1).rows is None
    assert known_to(owner, at_ms=HALF_MS + PRODUCERS_KEPT_MS - 1) == ["p"]
    assert known_to(owner, at_ms=HALF_MS + PRODUCERS_KEPT_MS) == []


@pytest.mark.parametrize("is_read", [False, True], ids=["the same owner", "the next owner"])
def test_a_clock_that_goes_back_makes_no_producer_older(is_read: bool) -> None:
    """The latest time at which a producer wrote is the one that counts."""
    owner = Owner()
    claim = owner.grant("p")
    for number, now_ms in enumerate((0, HALF_MS, 1)):
        owner.now_ms = now_ms
        owner.write(claim, number, 1)
    if is_read:
        assert known_to(owner, at_ms=HALF_MS + PRODUCERS_KEPT_MS - 1) == ["p"]
        return
    for now_ms, names in ((PRODUCERS_KEPT_MS + 1, ["p"]), (HALF_MS + PRODUCERS_KEPT_MS, [])):
        owner.now_ms, owner.lssn = now_ms, owner.lssn + 1
        stamp = owner.entry()
        assert stamp is not None
        assert [row.name for row in stamp.rows or ()] == names


def test_a_producer_with_records_on_their_way_keeps_its_place() -> None:
    """However long it is silent: another one goes, which was silent for less."""
    owner = Owner(producers_max=2)
    waits = owner.grant("waits")
    mark = owner.accept(waits, 0, 1, "sent")
    owner.now_ms = 1
    owner.write(owner.grant("settled"), 0, 1)
    owner.now_ms = 1 + KEPT_MS
    owner.grant("new")
    assert owner.producers.look_at(waits, 0, 1) == InFlight("sent", is_last=True)
    assert durable_of(owner.producers, "settled") == -1
    owner.entry(MarkedRows(mark, 1, 0))
    owner.producers.durable(mark, 1, DLSN(1, 1, 0))
    assert durable_of(owner.producers, "waits") == 0


def test_each_extent_begins_with_a_list() -> None:
    """Also a second one of the same segment: what is between the two may be of others."""
    owner = Owner()
    claim = owner.grant("p")
    owner.write(claim, 0, 1)
    listed = []
    for entry_id, is_first in ((9, True), (10, False)):
        stamp = owner.producers.stamp(
            (), lssn=1, entry_id=entry_id, size_bytes=0, now_ms=0, is_first=is_first
        )
        listed.append(decode_stamp(memoryview(stamp)))
    assert [(each.snapshot, each.rows is None) for each in listed] == [(9, False), (9, True)]
