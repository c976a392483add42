"""Tickets: which records of a log a reader wants.  JSON, so that any client can write one by hand.

    {"log": "clicks"}                                          all that is readable now
    {"log": "clicks", "start": {"latest": true}, "follow": true}
    {"log": "clicks", "start": {"dlsn": "3:17:0"}, "end": {"dlsn": "9:0:0"}, "columns": ["value"]}

Positions are half-open.  One that names a record which there is not means the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime  # msgspec reads it when it decodes
from typing import Annotated, TypeAlias

import msgspec

from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN, TXID_MAX, LogId, validate_log_name
from dlcore.base.records import NotLessThan, RecordField
from dlcore.flight.requests import MALFORMED

FORMAT = 1
TICKET_BYTES_MAX = 64 * 1024
"""A ticket names columns, of which a log may have many; what is longer is none."""
_SHOWN_BYTES = 200
_Number = Annotated[int, msgspec.Meta(ge=0, le=TXID_MAX)]
_Time = Annotated[datetime, msgspec.Meta(tz=True)]


@dataclass(frozen=True, slots=True)
class Latest:
    """The end of what is readable when the request comes."""


Wanted: TypeAlias = DLSN | NotLessThan | Latest
"""A position, as a ticket names it."""


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One way to name a position; exactly one of its fields is set."""

    dlsn: str | None = None
    txid: _Number | None = None
    time: _Time | None = None
    sequence_id: _Number | None = None
    latest: bool = False

    def __post_init__(self) -> None:
        given = [self.dlsn, self.txid, self.time, self.sequence_id, self.latest or None]
        if sum(each is not None for each in given) != 1:
            raise ConfigurationError("expected one of dlsn, txid, time, sequence_id and latest")
        if self.dlsn is not None:
            DLSN.parse(self.dlsn)

    @property
    def wanted(self) -> Wanted:
        """The position."""
        if self.dlsn is not None:
            return DLSN.parse(self.dlsn)
        if self.txid is not None:
            return NotLessThan(RecordField.TXID, self.txid)
        if self.time is not None:
            return NotLessThan(RecordField.TIMESTAMP_MS, _ms(self.time))
        if self.sequence_id is not None:
            return NotLessThan(RecordField.SEQUENCE_ID, self.sequence_id)
        return Latest()


class Ticket(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a reader wants.

    Attributes:
        log: its name.
        log_id: its identity, by which it is found whatever its name is by now, and told from one
            that was created again under its name.
        start: the first record wanted; None: the first one that is not truncated.
        end: where to stop; None: at what is readable when the request comes, or never.
        follow: go on with records that come later, up to `end` if there is one.
        columns: which ones; None: those that the log's rows have.
        format: of the ticket.
    """

    log: str
    log_id: LogId | None = None
    start: Place | None = None
    end: Place | None = None
    follow: bool = False
    columns: list[str] | None = None
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigurationError(f"format={self.format}: expected {FORMAT}")
        validate_log_name(self.log)
        if self.follow and self.end is not None and self.end.dlsn is None:
            raise ConfigurationError("what is followed has no end, or one that is a dlsn")

    def encode(self) -> bytes:
        """Return it as clients send it."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """Return what a client sent, or raise `ConfigurationError` saying what is wrong."""
        if len(data) > TICKET_BYTES_MAX:
            raise ConfigurationError(
                f"a ticket of {len(data):,} bytes: expected at most {TICKET_BYTES_MAX:,}"
            )
        try:
            return msgspec.json.decode(data, type=cls)
        except (*MALFORMED, ConfigurationError) as error:
            shown = data[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
            raise ConfigurationError(
                f"not a ticket: {shown!r}: {error}; expected JSON such as "
                '{"log": "clicks", "start": {"dlsn": "3:17:0"}, "follow": true}'
            ) from error


def _ms(time: datetime) -> int:
    """Return the first millisecond since the epoch that is not before `time`."""
    seconds, microseconds = int(time.replace(microsecond=0).timestamp()), time.microsecond
    return seconds * 1000 + -(-microseconds // 1000)
