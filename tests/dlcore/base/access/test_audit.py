"""The chain of the audit log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dlcore.base.access.audit import BEGINNING, TEXT_MAX, AuditLine, Chain, verify
from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

LINE = AuditLine(
    time="2026-11-26T12:00:00.000Z",
    principal="user:alice",
    address="10.0.0.1",
    entrance="DoAction/delete",
    resource="log 'clicks'",
    result="ok",
)


def written(count: int) -> list[bytes]:
    """Return the lines of a log."""
    chain = Chain()
    return [chain.next(LINE) for _ in range(count)]


def test_a_log_is_verified_at_once_and_in_parts() -> None:
    """A rotated file begins with the digest of the last line of the one before."""
    lines = written(5)
    assert len(set(lines)) == 5
    count, digest = verify(lines)
    assert count == 5
    middle = verify(lines[:3])
    assert middle[0] == 3
    assert verify(lines[3:], digest=middle[1]) == (2, digest)
    assert verify([]) == (0, BEGINNING)
    assert Chain(digest).next(LINE) == written(6)[5]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: lines.pop(0), 1),
        (lambda lines: lines.pop(2), 3),
        (lambda lines: lines.insert(1, lines.pop(2)), 2),
        (lambda lines: lines.insert(2, lines[1]), 3),
        (lambda lines: lines.__setitem__(1, lines[1].replace(b"alice", b"bob")), 3),
        (lambda lines: lines.__setitem__(1, b"{}\n"), 2),
        (lambda lines: lines.__setitem__(1, b"\xff\n"), 2),
    ],
)
def test_a_change_is_found_at_its_line(change: Callable[[list[bytes]], object], line: int) -> None:
    """An altered line is whole by itself: the one after it shows the change."""
    lines = written(5)
    change(lines)
    with pytest.raises(ConfigurationError, match=f"^line {line}: "):
        verify(lines)


def test_long_texts_of_callers_are_cut() -> None:
    """A caller chooses the names in its requests."""
    names = ("principal", "address", "entrance", "resource", "result", "time")
    line = Chain().next(msgspec.structs.replace(LINE, **dict.fromkeys(names, "x" * 9999)))
    assert len(line) < 6 * TEXT_MAX + 10_000
    assert line.count(b"x") == 5 * TEXT_MAX + 9999
    verify([line])
