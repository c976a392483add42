"""Positions where a read begins or ends, as options state them: values, and their parsers."""

from __future__ import annotations

import datetime
import enum
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.base.access.capability import LIFETIME_S_MAX
from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN, TXID_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

_INTEGER = re.compile(r"[+-]?\d{1,100}")  # Python refuses to convert a text of thousands of digits
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class Edge(enum.Enum):
    """An end of a log: its first readable record, or the position after its last one."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class TxidBound:
    """The first record whose transaction id is not below `txid`."""

    txid: int

    def __str__(self) -> str:
        return f"transaction id {self.txid}"


@dataclass(frozen=True, slots=True)
class TimestampBound:
    """The first record whose timestamp is not below `timestamp_ms` (epoch milliseconds)."""

    timestamp_ms: int

    def __str__(self) -> str:
        return f"timestamp {self.timestamp_ms}"


Position = Edge | DLSN | TimestampBound


@dataclass(frozen=True, slots=True)
class PositionsByLog:
    """A position for each log by its name."""

    positions: Mapping[str, Position]


Bound = Edge | DLSN | TxidBound | TimestampBound | PositionsByLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Where a read starts and ends in each log."""

    start: Bound
    must_reach_start: bool
    """Whether it is an error if a log does not reach `start` yet; else it is read from its end."""
    end: Bound | None
    """None for a stream."""


def parse_offsets(option: str, text: str) -> Edge | DLSN | PositionsByLog:
    """Parse ``earliest``, ``latest``, a DLSN, or a JSON object of these by log name.

    Raises:
        ConfigurationError: it is something else; the error says what is expected.
    """
    if not text.lstrip().startswith("{"):
        return _parse_position(option, text)
    rule = 'expected JSON such as {"clicks": "3:17:0", "views": "earliest"}'
    positions: dict[str, Position] = {}
    for log, value in _parse_by_log(option, text, rule).items():
        if not isinstance(value, str):
            raise ConfigurationError(
                f"option {option}: the position of log {log!r} is {value!r}; {rule}"
            )
        positions[log] = _parse_position(f"{option} (log {log!r})", value)
    return PositionsByLog(positions)


def parse_timestamps(option: str, text: str) -> PositionsByLog:
    """Parse a JSON object of times by log name, each as `parse_timestamp` takes it.

    Raises:
        ConfigurationError: it is something else; the error says what is expected.
    """
    rule = 'expected JSON such as {"clicks": 1714564800000, "views": "2024-05-01T12:00:00Z"}'
    positions: dict[str, Position] = {}
    for log, value in _parse_by_log(option, text, rule).items():
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ConfigurationError(
                f"option {option}: the time of log {log!r} is {value!r}; {rule}"
            )
        positions[log] = parse_timestamp(f"{option} (log {log!r})", str(value))
    return PositionsByLog(positions)


def _parse_by_log(option: str, text: str, rule: str) -> dict[str, object]:
    try:
        # Python takes the last of two equal keys, and the user would read from another place than
        # meant.
        parsed = json.loads(text, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:  # the latter for a text that is nested too deep
        raise ConfigurationError(f"option {option}={text!r}: {error}; {rule}") from error
    if not isinstance(parsed, dict) or not parsed:
        raise ConfigurationError(f"option {option}={text!r} names no log; {rule}")
    return parsed


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique: dict[str, object] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"log {key!r} occurs twice")
        unique[key] = value
    return unique


def _parse_position(option: str, text: str) -> Edge | DLSN:
    word = text.strip()
    for edge in Edge:
        if word.lower() == edge.value:
            return edge
    try:
        return DLSN.parse(word)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"option {option}={text!r}: expected earliest, latest or a DLSN such as 3:17:0"
        ) from error


def parse_txid(option: str, text: str) -> TxidBound:
    """Parse a transaction id."""
    return TxidBound(parse_integer(option, text, minimum=0, maximum=TXID_MAX))


def parse_integer(option: str, text: str, *, minimum: int, maximum: int = 2**63 - 1) -> int:
    """Parse an integer within a range.

    Raises:
        ConfigurationError: it is something else; the error names the option, value and range.
    """
    word = text.strip()
    if _INTEGER.fullmatch(word) and minimum <= int(word) <= maximum:
        return int(word)
    bounds = f"in {minimum} … {maximum}"
    if maximum == 2**63 - 1:
        bounds = f">= {minimum} and < 2**63"
    raise ConfigurationError(f"option {option}={text!r}: expected an integer {bounds}")


def parse_size(option: str, text: str) -> int:
    """Parse bytes, at least one: a number, or one with the unit k, m or g.

    Raises:
        ConfigurationError: it is something else; the error says what is expected.
    """
    found = re.fullmatch(r"(\d{1,100})\s*(?:([kmg])b?)?", text.strip().lower())
    size = int(found[1]) * 1024 ** " kmg".index(found[2] or " ") if found else 0
    if not 1 <= size < 2**63:
        raise ConfigurationError(
            f"option {option}={text!r}: expected bytes > 0 and < 2**63 such as 1000 or 64m"
        )
    return size


def parse_duration(option: str, text: str) -> float:
    """Parse a time in ms, s, m or h, as Spark writes it; return seconds.

    Raises:
        ConfigurationError: it is something else; the error says what is expected.
    """
    found = re.fullmatch(r"(\d{1,15})\s*(ms|s|m|min|h)", text.strip().lower())
    if found is None:
        raise ConfigurationError(
            f"option {option}={text!r}: expected a time such as 90s, 15m or 1h"
        )
    return int(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600}[found[2]]


def parse_lifetime(option: str, text: str) -> int | None:
    """Parse for how long capabilities are valid; return seconds.

    Raises:
        ConfigurationError: it is no time, or not within a day.
    """
    seconds = parse_duration(option, text)
    if not 1 <= seconds <= LIFETIME_S_MAX:
        raise ConfigurationError(f"option {option}={text!r}: expected a time from 1s to 24h")
    return int(seconds)


def parse_timestamp(option: str, text: str) -> TimestampBound:
    """Parse epoch milliseconds or ISO-8601; a time without a zone is UTC.

    Raises:
        ConfigurationError: it is something else; the error says what is expected.
    """
    word = text.strip()
    if _INTEGER.fullmatch(word):
        return TimestampBound(parse_integer(option, word, minimum=0))
    try:
        moment = datetime.datetime.fromisoformat(word)
    except ValueError as error:
        raise ConfigurationError(
            f"option {option}={text!r}: expected epoch milliseconds or ISO-8601 such as "
            "2024-05-01T12:00:00Z"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    # Rounded up: "not before" a microsecond equals "not before" the next whole millisecond.
    millisecond = datetime.timedelta(milliseconds=1)
    milliseconds = -((_EPOCH - moment) // millisecond)
    if milliseconds < 0:
        raise ConfigurationError(f"option {option}={text!r}: expected a time since 1970")
    return TimestampBound(milliseconds)
