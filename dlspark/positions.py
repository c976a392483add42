"""Positions where a read begins or ends, as options say it: values, and parsing their texts."""

from __future__ import annotations

import datetime
import enum
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.errors import ConfigurationError
from dlcore.ids import DLSN, TXID_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

_INTEGER = re.compile(r"[+-]?\d+")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class Edge(enum.Enum):
    """An end of a log: its first readable record, or the position after its last one."""

    EARLIEST = "earliest"
    LATEST = "latest"


Position = Edge | DLSN


@dataclass(frozen=True, slots=True)
class TxidBound:
    """The first record whose transaction id is not below `txid`."""

    txid: int


@dataclass(frozen=True, slots=True)
class TimestampBound:
    """The first record whose timestamp is not below `timestamp_ms` (epoch milliseconds)."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class PositionsByLog:
    """A position for each log by its name."""

    positions: Mapping[str, Position]


Bound = Edge | DLSN | TxidBound | TimestampBound | PositionsByLog


def parse_offsets(option: str, text: str) -> Edge | DLSN | PositionsByLog:
    """Parse ``earliest``, ``latest``, a DLSN, or a JSON object of these by log name."""
    if not text.lstrip().startswith("{"):
        return _parse_position(option, text)
    rule = 'expected JSON such as {"clicks": "3:17:0", "views": "earliest"}'
    try:
        parsed = json.loads(text, object_pairs_hook=_unique_pairs)
    except ValueError as error:
        raise ConfigurationError(f"option {option}={text!r}: {error}; {rule}") from error
    positions: dict[str, Position] = {}
    for log, value in parsed.items():
        if not isinstance(value, str):
            raise ConfigurationError(
                f"option {option}: the position of log {log!r} is {value!r}; {rule}"
            )
        positions[log] = _parse_position(f"{option} (log {log!r})", value)
    if not positions:
        raise ConfigurationError(f"option {option}={text!r} names no log; {rule}")
    return PositionsByLog(positions)


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique: dict[str, object] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"log {key!r} occurs twice")
        unique[key] = value
    return unique


def _parse_position(option: str, text: str) -> Position:
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
    """Parse an integer of a range, or raise naming the option, the value and the range."""
    word = text.strip()
    if _INTEGER.fullmatch(word) and minimum <= int(word) <= maximum:
        return int(word)
    bounds = f">= {minimum}" if maximum == 2**63 - 1 else f"in {minimum} … {maximum}"
    raise ConfigurationError(f"option {option}={text!r}: expected an integer {bounds}")


def parse_timestamp(option: str, text: str) -> TimestampBound:
    """Parse epoch milliseconds or ISO-8601; a time without a zone is UTC."""
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
    # Rounded up: "not before" a microsecond is "not before" the next whole millisecond.
    millisecond = datetime.timedelta(milliseconds=1)
    milliseconds = -((_EPOCH - moment) // millisecond)
    if milliseconds < 0:
        raise ConfigurationError(f"option {option}={text!r}: expected a time since 1970")
    return TimestampBound(milliseconds)
