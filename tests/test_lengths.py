"""A sample is the same in each run, and has of everything; with ``--full`` there is all of it."""

from __future__ import annotations

import inspect
import itertools

import pytest

from tests.fixtures import lengths
from tests.fixtures.lengths import amount, for_each, sample


@pytest.fixture
def _sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_is_full", False)


@pytest.mark.usefixtures("_sampled")
def test_a_sample_is_in_order_and_has_both_ends() -> None:
    """And as many as asked for, or a few less."""
    for size, count in itertools.product((30, 97, 4096), (2, 3, 9)):
        found = sample(range(size), count)
        assert found == sorted(set(found))
        assert (found[0], found[-1]) == (0, size - 1)
        assert count - 1 <= len(found) <= count
    assert sample("abc", 1) == ["a"]
    assert sample("abc", 3) == ["a", "b", "c"]
    assert sample((), 3) == []


@pytest.mark.usefixtures("_sampled")
def test_a_sample_meets_every_bit_and_every_part() -> None:
    """At a tenth of the bits of 60 bytes, which a fixed distance would not."""
    found = sample(itertools.product(range(60), range(8)), 48)
    assert {bit for _, bit in found} == set(range(8))
    assert {byte // 6 for byte, _ in found} == set(range(10))


def test_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything, and the larger amount."""
    monkeypatch.setattr(lengths, "_is_full", True)
    assert sample(range(1000), 3) == list(range(1000))
    assert amount(7, sampled=2) == 7
    monkeypatch.setattr(lengths, "_is_full", False)
    assert amount(7, sampled=2) == 2


def test_a_failure_for_one_of_many_is_named() -> None:
    """With the value; those before it were run, and none is a fixture to pytest."""
    seen: list[int] = []

    @for_each([3, 5, 7])
    def test_some(number: int) -> None:
        """Fail for 5."""
        seen.append(number)
        assert number != 5

    with pytest.raises(AssertionError) as failed:
        test_some()
    assert seen == [3, 5]
    assert failed.value.__notes__ == ["it was run with 5"]
    assert not inspect.signature(test_some).parameters
    assert (test_some.__name__, test_some.__doc__) == ("test_some", "Fail for 5.")
