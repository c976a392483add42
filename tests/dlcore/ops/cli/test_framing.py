"""Records in streams of bytes: any chunks make the same records, and bad input is named."""

from __future__ import annotations

import click
import pytest
from hypothesis import given, strategies as st

from dlcore.base.config import RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import ConfigurationError
from dlcore.ops.cli.framing import DELIMITER, Delimited, Framed, Splitter, Whole, framed

PIECES = st.lists(st.integers(1, 7), min_size=1, max_size=30)


def split(splitter: Splitter, data: bytes, sizes: list[int]) -> list[bytes]:
    """Feed `data` in chunks of these sizes, again and again."""
    records, at, turn = [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        records += splitter.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    return records + splitter.end()


@given(st.lists(st.binary(max_size=20)), PIECES)
def test_framed_records_come_back(records: list[bytes], sizes: list[int]) -> None:
    """Any bytes, empty ones too."""
    assert split(Framed(), b"".join(map(framed, records)), sizes) == records


@given(st.binary(max_size=60), st.sampled_from([b"\n", b"\0", b"ab", b"aa"]), PIECES)
def test_delimited_records_are_those_of_a_plain_split(
    data: bytes, delimiter: bytes, sizes: list[int]
) -> None:
    """The text behind the last delimiter is a record, unless it is empty."""
    expected = data.split(delimiter)
    if expected[-1] == b"":
        expected.pop()
    assert split(Delimited(delimiter), data, sizes) == expected


def test_whole_input() -> None:
    """One record, or none of no input."""
    assert split(Whole(), b"a\nb\0", [3]) == [b"a\nb\0"]
    assert split(Whole(), b"", [3]) == []


@pytest.mark.parametrize(
    ("splitter", "data", "complaint"),
    [
        (Framed(), b"\0\0", "ends inside a record: 2 bytes"),
        (Framed(), b"\0\0\0\5abc", "ends inside a record: 7 bytes"),
        (Framed(), b"GET / HTTP/1.1", "may not be framed"),
        (Delimited(b"\0"), b"x" * (RECORD_SIZE_BYTES_MAX + 2), "no delimiter"),
        (Whole(), b"x" * (RECORD_SIZE_BYTES_MAX + 1), "larger than a record"),
    ],
)
def test_input_that_makes_no_records(splitter: Splitter, data: bytes, complaint: str) -> None:
    """It is named, and memory is bounded."""
    with pytest.raises(ConfigurationError, match=complaint):
        split(splitter, data, [1 << 20])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("\\0", b"\0"), ("\\n", b"\n"), ("\\x1e", b"\x1e"), (", ", b", "), ("\\\\", b"\\")],
)
def test_delimiters_are_text_with_escapes(text: str, expected: bytes) -> None:
    """As shells pass them."""
    assert DELIMITER.convert(text, None, None) == expected
    assert DELIMITER.convert(expected, None, None) == expected


@pytest.mark.parametrize("text", ["", "\\x", "\\u2022"])
def test_texts_that_are_no_delimiter(text: str) -> None:
    """It is refused."""
    with pytest.raises(click.BadParameter):
        DELIMITER.convert(text, None, None)
