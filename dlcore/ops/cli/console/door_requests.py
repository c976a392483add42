"""Requests of the HTTP door, read from their headers, query and body; no I/O.

An append has a key, which is its user's.  The claim of a producer is made of the user, the key and
the body alone.  By it the log knows a repeated append, whichever console it comes through, and
whichever proxy owns the log then.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

import click
import msgspec

from dlcore.base.errors import (
    ConfigurationError,
    LogRecordTooLongError,
    UnauthenticatedError,
    UnknownActionError,
)
from dlcore.base.ids import DLSN
from dlcore.log.entries.stamp import GENERATED_PREFIX, TOKEN_BYTES, Claim
from dlcore.ops.cli.times import EpochMs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BODY_BYTES_MAX = 1024 * 1024
"""The largest body of an append."""
RECORDS_MAX = 10_000
"""Most records of an append, and of an answer."""
RECORDS = 1_000
"""Records of an answer if the request does not say how many."""
KEY_CHARACTERS_MAX = 255
JSON_KINDS = ("application/json", "application/jsonl", "application/x-ndjson")
"""Types of a body whose lines are JSON, each a record."""
BYTES_KIND = "application/octet-stream"
"""The type of a body that is one record."""
EVENTS_KIND = "text/event-stream"
KEY = "Idempotency-Key"
LAST_EVENT = "Last-Event-ID"
_SINGLE = ("Authorization", "Content-Type", KEY, LAST_EVENT)
"""Headers that a request has once at most: who calls, and what it asks for, must be plain."""
_BEARER = "bearer"
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_DLSN_COLONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A request to read; without a position, a time and `at_end` from the first record on."""

    dlsn: DLSN | None = None
    timestamp_ms: int | None = None
    at_end: bool = False
    limit: int = RECORDS
    columns: tuple[str, ...] | None = None
    is_stream: bool = False


def require_single(names: Iterable[str]) -> None:
    """Raise if a header that may come once is among these names twice.

    Raises: ConfigurationError.
    """
    counts = Counter(name.lower() for name in names)
    for name in _SINGLE:
        if counts[name.lower()] > 1:
            raise ConfigurationError(
                f"header {name} is given {counts[name.lower()]} times: expected it once"
            )


def token_of(headers: Mapping[str, str]) -> str:
    """Return the bearer token of a request.  Raises: UnauthenticatedError."""
    kind, _, token = headers.get("Authorization", "").partition(" ")
    if kind.lower() != _BEARER or not token.strip() or not token.isascii():
        raise UnauthenticatedError(
            "the request does not say who calls: expected a header `Authorization: Bearer TOKEN`, "
            "with a token of the cluster's users, or with the secret that dlog console has printed"
        )
    return token.strip()


def kind_of(headers: Mapping[str, str]) -> str:
    """Return the type of an append's body.  Raises: ConfigurationError."""
    given = headers.get("Content-Type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind not in (*JSON_KINDS, BYTES_KIND):
        raise ConfigurationError(
            f"Content-Type {given!r}: expected {', '.join(JSON_KINDS)} for lines of JSON, or "
            f"{BYTES_KIND} for one record of any bytes"
        )
    return kind


def key_of(headers: Mapping[str, str]) -> str:
    """Return the key of an append.  Raises: ConfigurationError."""
    key = headers.get(KEY, "")
    if not (key.isascii() and key.isprintable() and 1 <= len(key) <= KEY_CHARACTERS_MAX):
        raise ConfigurationError(
            f"{KEY} {key!r}: expected 1 to {KEY_CHARACTERS_MAX} printable ASCII characters, a new "
            "key for each append, such as of uuidgen, and the same one when it is sent again"
        )
    return key


def require_size(size_bytes: int | None) -> None:
    """Raise unless a body of this size is accepted; None: its size is not known yet.

    Raises: LogRecordTooLongError.
    """
    if size_bytes is not None and size_bytes > BODY_BYTES_MAX:
        raise LogRecordTooLongError(
            f"a body of {size_bytes:,} bytes: expected at most {BODY_BYTES_MAX:,}; send the "
            "records in several appends, each with a key of its own"
        )


def claim_of(user: tuple[str, str], key: str, kind: str, body: bytes) -> Claim:
    """Return the claim of an append.

    Its producer is named by the key and the user, an issuer and a name that is unique there; its
    token by the body.
    """
    name = hashlib.blake2b(msgspec.json.encode([*user, key]), digest_size=16).digest()
    token = hashlib.blake2b(kind.encode() + b"\n" + body, digest_size=TOKEN_BYTES).digest()
    text = base64.urlsafe_b64encode(name).decode().rstrip("=")
    return Claim(name=f"{GENERATED_PREFIX}http-{text}", epoch=1, base=0, token=token)


def records_in(kind: str, body: bytes) -> list[bytes]:
    """Return the records of a body, at least one: its lines, or all of it.

    Raises: ConfigurationError: there is none, or a line is empty or no JSON.
    """
    if kind == BYTES_KIND:
        return [body]
    lines = [line.strip() for line in body.rstrip().split(b"\n")]
    if len(lines) > RECORDS_MAX:
        raise ConfigurationError(
            f"a body of {len(lines):,} lines: expected at most {RECORDS_MAX:,} records"
        )
    for number, line in enumerate(lines, 1):
        try:
            msgspec.json.decode(line)
        except _MALFORMED as error:
            raise ConfigurationError(
                f"line {number}: {error}: expected one JSON value in each line"
            ) from error
    return lines


def read_of(
    query: Sequence[tuple[str, str]], headers: Mapping[str, str], *, now_ms: int
) -> Reading:
    """Return a request to read.

    Args:
        query: names and values of the request's query, in order.
        headers: its headers.
        now_ms: the time, before which ages are meant.

    Raises: ConfigurationError.
    """
    is_stream = EVENTS_KIND in headers.get("Accept", "").lower()
    given = dict(query)
    if len(given) < len(query):
        raise ConfigurationError(f"{_repeated(query)!r} is given twice: expected it once")
    allowed = ["from", "after", "columns", *(() if is_stream else ("limit",))]
    unknown = sorted(given.keys() - set(allowed))
    if unknown:
        raise ConfigurationError(f"query {unknown[0]!r}: expected {', '.join(allowed)}")
    if "from" in given and "after" in given:
        raise ConfigurationError(
            f"from={given['from']!r} and after={given['after']!r}: expected one of them"
        )
    last = headers.get(LAST_EVENT, "") if is_stream else ""
    after = last or given.get("after", "")
    start = Reading(dlsn=DLSN.parse(after).next_slot()) if after else _start_of(given, now_ms)
    columns = given.get("columns")
    return Reading(
        dlsn=start.dlsn,
        timestamp_ms=start.timestamp_ms,
        at_end=start.at_end,
        limit=_limit_of(given.get("limit")),
        columns=None if columns is None else tuple(columns.split(",")),
        is_stream=is_stream,
    )


def require_within(dlsn: DLSN, end: DLSN) -> None:
    """Raise if a request begins behind the end of its log, where no client has been.

    Raises: ConfigurationError.
    """
    if dlsn > end:
        raise ConfigurationError(
            f"the first position wanted, {dlsn}, is past the end of the log: expected at most "
            f"{end}, the position of the next record; another log has the position, or had it"
        )


def unknown(method: str, path: str, status: int) -> UnknownActionError | None:
    """Return the error of a request that the table of entrances has not; None outside the door."""
    if not f"{path}/".startswith("/v1/"):
        return None
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        return UnknownActionError(f"method {method}: expected GET to read, or POST to append")
    return UnknownActionError(
        f"path {path!r}: expected /v1/logs/LOG/records with the name of a log, as in "
        "/v1/logs/team/clicks/records"
    )


def columns_of(asked: tuple[str, ...], schema: Sequence[str] | None, log: str) -> list[str]:
    """Return the columns asked for, of a log with these; None: of a log of bytes.

    Raises: ConfigurationError.
    """
    given = ",".join(asked)
    if schema is None:
        raise ConfigurationError(
            f"columns={given!r}: log {log!r} is a log of bytes, which has no columns: leave "
            "columns out"
        )
    for name in asked:
        if name not in schema or asked.count(name) > 1:
            raise ConfigurationError(
                f"columns={given!r}: {name!r} is no column of log {log!r}, or named twice: "
                f"expected some of {','.join(schema)}"
            )
    return list(asked)


def _repeated(query: Sequence[tuple[str, str]]) -> str:
    names = [name for name, _ in query]
    return next(name for name in names if names.count(name) > 1)


def _start_of(given: Mapping[str, str], now_ms: int) -> Reading:
    text = given.get("from", "earliest")
    if text == "earliest":
        return Reading()
    if text == "latest":
        return Reading(at_end=True)
    if text.count(":") == _DLSN_COLONS and text.replace(":", "").isdecimal():
        return Reading(dlsn=DLSN.parse(text))
    try:
        return Reading(timestamp_ms=max(0, EpochMs(lambda: now_ms).convert(text, None, None)))
    except click.ClickException as error:
        raise ConfigurationError(
            f"from={text!r}: expected earliest, latest, a position like 3:17:0, or a time like "
            "2026-01-31T12:00:00Z, -1h (an hour ago), or epoch milliseconds"
        ) from error


def _limit_of(text: str | None) -> int:
    if text is None:
        return RECORDS
    if not (re.fullmatch("[0-9]{1,5}", text) and 1 <= int(text) <= RECORDS_MAX):
        raise ConfigurationError(f"limit={text!r}: expected a number from 1 to {RECORDS_MAX:,}")
    return int(text)
