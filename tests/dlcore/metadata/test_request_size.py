"""The size of a request to the metadata store is known before it is sent."""

from __future__ import annotations

import pytest

from dlcore.base.errors import TransactionTooLargeError
from dlcore.metadata.port import (
    REQUEST_BYTES_MAX,
    Check,
    Create,
    Delete,
    Put,
    require_request_size,
)


def test_a_change_is_measured_as_it_is_sent() -> None:
    """Paths in bytes, values, and what each operation takes besides."""
    path = "/dlog/logs/ä"
    value = bytes(REQUEST_BYTES_MAX - 2 * (len(path.encode()) + 64))
    require_request_size([Put(path, value, 1), Delete(path)])
    for op in (Create(path, value + b"x"), Put(path, value + b"x", 1)):
        with pytest.raises(TransactionTooLargeError, match=str(REQUEST_BYTES_MAX + 1)):
            require_request_size([op, Check(path, 1)])


def test_many_small_operations_are_too_much_too() -> None:
    """Their values are next to nothing."""
    ops = [Delete(f"/{number:05}") for number in range(15_000)]
    with pytest.raises(TransactionTooLargeError, match="at once"):
        require_request_size(ops)
