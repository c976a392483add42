"""Log names, DLSNs and bookie ids: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, strategies as st

from dlcore.base.errors import ConfigurationError, InvalidLogNameError
from dlcore.base.ids import (
    DLSN,
    LOG_NAME_LENGTH_MAX,
    BookieId,
    validate_log_id,
    validate_log_name,
)

INT64_MAX = 2**63 - 1
DLSNS = st.builds(DLSN, *[st.integers(0, INT64_MAX)] * 3)


@pytest.mark.parametrize(
    "name",
    [
        "clicks",
        "a",
        "a/b/c",
        "a.b",
        "a/.b",  # only the name as a whole must not start with a dot
        "x-y_z=1:2#3@4+5%20",
        "größe",
        "日本/語",
        "😀",
        "x" * LOG_NAME_LENGTH_MAX,
    ],
)
def test_names_of_the_field_are_accepted(name: str) -> None:
    """As they are, and with one leading slash."""
    assert validate_log_name(name) == name
    assert validate_log_name(f"/{name}") == name


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "it is empty"),
        ("/", "it is empty"),
        ("//a", "empty component"),
        ("a//b", "empty component"),
        ("a/", "empty component"),
        ("...", "names starting with '.' are reserved"),
        (".hidden", "names starting with '.' are reserved"),
        ("/.hidden", "names starting with '.' are reserved"),
        ("a/./b", "'.' and '..' are not allowed"),
        ("a/..", "'.' and '..' are not allowed"),
        ("a b", "character ' ' is not allowed"),
        ("a\xa0b", "is not allowed"),
        ("a\u2028b", "is not allowed"),
        ("a\u3000b", "is not allowed"),
        ("a\u200bb", "is not allowed"),
        ("<default>", "character '<' is not allowed"),
        ("a>", "character '>' is not allowed"),
        ("a\x00", "is not allowed"),
        ("a\n", "is not allowed"),
        ("a\x7f", "is not allowed"),
        ("a\x9f", "is not allowed"),
        ("a\ue000", "is not allowed"),
        ("a\ud800", "is not allowed"),
        ("a\ufff0", "is not allowed"),
        ("b\ufffd", "is not allowed"),  # what decoders put in place of bytes that are no text
        ("a\uffff", "is not allowed"),
        ("x" * (LOG_NAME_LENGTH_MAX + 1), "longer than 512 bytes"),
        ("ü" * (LOG_NAME_LENGTH_MAX // 2 + 1), "longer than 512 bytes"),
    ],
)
def test_other_names_are_refused_with_the_reason(name: str, problem: str) -> None:
    """The message holds the name and the rule that it breaks."""
    with pytest.raises(InvalidLogNameError) as caught:
        validate_log_name(name)
    assert problem in str(caught.value)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("log_id", ["0" * 32, "a-1", "x" * 64])
def test_an_id_of_a_log_is_a_word(log_id: str) -> None:
    """As it is."""
    assert validate_log_id(log_id) == log_id


@pytest.mark.parametrize("log_id", ["", "x" * 65, "a/b", "..", "\x00", "1\n", "é", 7])
def test_another_id_of_a_log_is_refused_with_the_reason(log_id: str) -> None:
    """The message holds the value and what would be right."""
    with pytest.raises(ConfigurationError, match="expected 1 to 64 ASCII letters") as caught:
        validate_log_id(log_id)
    assert repr(log_id) in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_is_a_name_or_refused(name: str) -> None:
    """An accepted name is accepted again, unchanged, and is printable without spaces."""
    try:
        valid = validate_log_name(name)
    except InvalidLogNameError:
        return
    assert valid == name.removeprefix("/")
    assert validate_log_name(valid) == valid
    assert valid.isprintable()
    assert " " not in valid


@given(DLSNS)
def test_a_dlsn_is_parsed_from_its_text(dlsn: DLSN) -> None:
    """Also after a journey to another process."""
    assert DLSN.parse(str(dlsn)) == dlsn
    assert pickle.loads(pickle.dumps(dlsn)) == dlsn


@given(DLSNS, DLSNS)
def test_dlsns_are_ordered_by_segment_entry_slot(one: DLSN, two: DLSN) -> None:
    """The twin is the order of tuples."""
    assert (one < two) == (
        (one.lssn, one.entry_id, one.slot_id) < (two.lssn, two.entry_id, two.slot_id)
    )


def test_the_first_dlsn_and_the_next_slot() -> None:
    """As in DistributedLog."""
    assert str(DLSN.INITIAL) == "1:0:0"
    assert DLSN(3, 17, 0).next_slot() == DLSN(3, 17, 1)
    assert DLSN(3, 17, 5) < DLSN(3, 17, 5).next_slot() < DLSN(3, 18, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1:2",
        "1:2:3:4",
        "1:2:-3",
        "a:b:c",
        " 1:2:3",
        "1:2:3\n",
        "01:2:3",
        "1:2:\uff13",
        "1:2:3\uff13",
        "9" * 5000 + ":0:0",
        "1::3",
    ],
)
def test_text_that_is_no_dlsn_is_refused(text: str) -> None:
    """One form only: what is stored in checkpoints is canonical."""
    with pytest.raises(ConfigurationError) as caught:
        DLSN.parse(text)
    assert repr(text) in str(caught.value)
    assert "3:17:0" in str(caught.value)


@pytest.mark.parametrize("parts", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (2**63, 0, 0)])
def test_parts_outside_64_bits_are_refused(parts: tuple[int, int, int]) -> None:
    """From code and from text."""
    with pytest.raises(ConfigurationError, match=r"not (-1|9223372036854775808)"):
        DLSN(*parts)
    with pytest.raises(ConfigurationError):
        DLSN.parse(":".join(map(str, parts)))


def test_a_bookie_is_its_name_and_its_incarnation() -> None:
    """Another disk under the same name is another bookie."""
    one, two = BookieId("b1", "a" * 32), BookieId("b1", "b" * 32)
    assert one != two
    assert one < two < BookieId("b2", "a" * 32)
    assert str(one) == "b1/aaaaaaaa"


def test_a_dlsn_is_made_of_whole_numbers() -> None:
    """Text is none, though it shows a number."""
    with pytest.raises(ConfigurationError, match="whole numbers, not '1', 0, 0"):
        DLSN("1", 0, 0)  # type: ignore[arg-type]
