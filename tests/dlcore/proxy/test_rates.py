"""Rates: which records pass, how long writers wait, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from dlcore.base.errors import OverCapacityError
from dlcore.proxy.writing import rates as module
from dlcore.proxy.writing.rates import BURST_S, Rate, Rates, TokenBucket


def test_a_bucket_gives_a_burst_and_then_its_rate() -> None:
    """Tokens beyond the rate are a debt, which time pays; idle time gathers a burst at most."""
    bucket = TokenBucket(10)
    assert bucket.delay_s(0) == 0
    bucket.take(10)
    assert bucket.delay_s(0) == 0
    bucket.take(20)
    assert bucket.delay_s(0) == pytest.approx(2)
    assert bucket.delay_s(1.5) == pytest.approx(0.5)
    was_full = bucket.is_full
    assert bucket.delay_s(1000) == 0
    assert (was_full, bucket.is_full) == (False, True)
    bucket.take(15)
    assert bucket.delay_s(1000) == pytest.approx(0.5)


def test_without_limits_no_client_waits() -> None:
    """Nor is anything kept of anybody."""
    rates = Rates(wait_max_s=0)
    assert rates.join("a", "me").take(10**9, 10**12, now_s=0) == 0
    assert len(rates) == 0


@pytest.mark.parametrize("scope", ["stream", "log", "principal", "proxy"])
@pytest.mark.parametrize("unit", ["records_per_s", "bytes_per_s"])
def test_each_scope_counts_what_it_should(scope: str, unit: str) -> None:
    """Streams of another log, or principal, have rates of their own, unless it is the proxy's."""
    given: dict[str, Any] = {scope: Rate(**{unit: 100.0})}
    rates = Rates(**given, wait_max_s=10)
    first = rates.join("a", "me")
    assert first.take(100, 100, now_s=0) == 0
    assert first.take(100, 100, now_s=0) == 0
    assert first.take(100, 100, now_s=0) == pytest.approx(1)
    shares = {"stream": [0, 0, 0], "log": [2, 0, 3], "principal": [2, 3, 0], "proxy": [2, 3, 4]}
    others = [rates.join("a", "me"), rates.join("b", "me"), rates.join("a", None)]
    waits = [each.take(100, 100, now_s=0) for each in others]
    assert waits == pytest.approx(shares[scope])


def test_a_stream_to_several_logs_has_one_rate_of_its_own() -> None:
    """Beside the rate of each log."""
    rates = Rates(stream=Rate(records_per_s=100), log=Rate(records_per_s=10), wait_max_s=100)
    stream = rates.join("staging", "me")
    waits = [stream.to(log).take(20, 0, now_s=0) for log in ("a", "b", "a", "a")]
    assert waits == pytest.approx([0, 0, 1, 3])
    assert stream.to("c").take(100, 0, now_s=0) == 0
    assert stream.to("d").take(1, 0, now_s=0) == pytest.approx(0.8)


def test_a_call_that_would_wait_too_long_is_refused_with_a_time() -> None:
    """A refused stream takes nothing: a waiting one has the debt of those before it only."""
    rates = Rates(log=Rate(records_per_s=10), stream=Rate(bytes_per_s=1), wait_max_s=2)
    stream = rates.join("a", None)
    assert stream.take(1000, 0, now_s=0) == 0  # of any size, when nothing is owed
    for _ in range(2):
        with pytest.raises(OverCapacityError, match="rate of log 'a' is used up for 99") as caught:
            stream.take(1, 0, now_s=0)
        assert caught.value.retry_after_s == pytest.approx(99)
    assert stream.take(1, 0, now_s=98) == pytest.approx(1)


def test_kept_buckets_are_bounded_by_busy_principals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that are full go; one that owes stays, also if no client writes to its log now."""
    monkeypatch.setattr(module, "KEPT_MAX", 10)
    rates = Rates(log=Rate(records_per_s=10), wait_max_s=100)
    rates._prunes_at = 10
    rates.join("busy", None).take(10_000, 0, now_s=0)
    for number in range(200):
        rates.join(f"log {number}", None).take(1, 0, now_s=number)
    assert len(rates) <= 20
    assert rates.join("busy", None).take(1, 0, now_s=950) == pytest.approx(49, abs=0.2)


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.floats(0, 3), st.integers(0, 2)), min_size=1, max_size=40
    )
)
def test_passed_bytes_keep_to_the_rate(batches: list[tuple[int, float, int]]) -> None:
    """Over any time: the rate, a burst, and the one batch that passed while nothing was owed."""
    rates = Rates(log=Rate(records_per_s=10), wait_max_s=5)
    streams = [rates.join("a", None) for _ in range(3)]
    now_s, passed, refused = 0.0, [], []
    for records, pause_s, stream in batches:
        now_s += pause_s
        try:
            delay_s = streams[stream].take(records, 0, now_s=now_s)
        except OverCapacityError as error:
            refused.append(error.retry_after_s)
        else:
            assert 0 <= delay_s <= 5
            passed.append((now_s + delay_s, records))
    assert all(after_s > 5 for after_s in refused)
    assert passed == sorted(passed, key=lambda each: each[0])  # in turn, over all streams
    for index, (begin_s, _) in enumerate(passed):
        for end, (end_s, last) in enumerate(passed[index:], index):
            total = sum(records for _, records in passed[index : end + 1])
            assert total <= 10 * (end_s - begin_s) + 10 * BURST_S + last + 1e-6


def test_other_rates_hold_for_the_streams_that_there_are() -> None:
    """A limit comes, another follows, and none is left."""
    rates = Rates(wait_max_s=100)
    stream = rates.join("a", "me")
    other = stream.to("b")
    assert stream.take(10**9, 0, now_s=0) == 0
    rates.configure(stream=Rate(records_per_s=100), log=Rate(records_per_s=10), wait_max_s=100)
    assert stream.is_limited
    assert [each.take(20, 0, now_s=0) for each in (stream, other, stream)] == [0, 0, 1]
    assert other.take(100, 0, now_s=0) == pytest.approx(1)
    rates.configure(log=Rate(records_per_s=1000), wait_max_s=100)
    assert stream.take(1, 0, now_s=0) == 0  # earlier debts are forgiven
    rates.configure(proxy=Rate(bytes_per_s=1), wait_max_s=2)
    assert stream.take(1, 4, now_s=0) == 0
    with pytest.raises(OverCapacityError, match="this proxy"):
        other.take(1, 1, now_s=0)
    rates.configure(wait_max_s=0)
    assert not other.is_limited
    assert stream.take(10**9, 10**9, now_s=0) == 0
