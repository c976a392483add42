"""What the store of logs refuses to send."""

from __future__ import annotations

import pytest

from dlcore.errors import TransactionTooLargeError
from dlcore.log.metadata.store import CHANGE_BYTES_MAX, require_change_size
from dlcore.metadata.port import Check, Create, Delete, Put


def test_a_change_is_measured_as_it_is_sent() -> None:
    """Paths in bytes, values, and what each operation takes besides."""
    path = "/dlog/logs/ä"
    value = bytes(CHANGE_BYTES_MAX - 2 * (len(path.encode()) + 64))
    require_change_size([Put(path, value, 1), Delete(path)])
    for op in (Create(path, value + b"x"), Put(path, value + b"x", 1)):
        with pytest.raises(TransactionTooLargeError, match=str(CHANGE_BYTES_MAX + 1)):
            require_change_size([op, Check(path, 1)])


def test_many_small_operations_are_too_much_too() -> None:
    """Their values are next to nothing."""
    ops = [Delete(f"/{number:05}") for number in range(15_000)]
    with pytest.raises(TransactionTooLargeError, match="at once"):
        require_change_size(ops)
