"""The attempts of a transaction: what is tried again, and for how long."""

from __future__ import annotations

import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    DLError,
    MetadataConnectionError,
    MetadataSessionExpiredError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.metadata.attempts import ATTEMPTS_MAX, Attempts, pause_after

OPEN = (
    MetadataVersionError("changed"),
    NodeExistsError("exists"),
    NoNodeError("gone"),
    MetadataConnectionError("away"),
    MetadataSessionExpiredError("expired"),
)


@pytest.mark.parametrize("error", OPEN, ids=lambda error: type(error).__name__)
def test_a_conflict_and_a_lost_answer_are_tried_again(error: DLError) -> None:
    """After a pause that names the reason, so often; then the caller hears of it."""
    attempts = Attempts("merging log 'clicks'", "to swap")
    for number in range(1, ATTEMPTS_MAX):
        attempts = attempts.failed(error)
        assert attempts.count == number
    assert pause_after(error).error is error
    assert pause_after(error).s_max > 0
    with pytest.raises(MetadataConnectionError) as caught:
        attempts.failed(error)
    assert str(caught.value) == (
        f"merging log 'clicks': {ATTEMPTS_MAX} attempts to swap were overtaken or not answered"
    )


def test_each_transaction_has_its_own_attempts() -> None:
    """They are counted from its beginning."""
    attempts = Attempts("a", "b")
    for _ in range(ATTEMPTS_MAX - 1):
        attempts = attempts.failed(OPEN[0])
    assert attempts.none().failed(OPEN[0]) == Attempts("a", "b", 1)


def test_another_error_ends_them() -> None:
    """It is raised as it is."""
    attempts, error = Attempts("a", "b"), AlreadyClosedError("closed")
    with pytest.raises(AlreadyClosedError) as caught:
        attempts.failed(error)
    assert caught.value is error
