"""Tickets of Arrow Flight: the request for a range of a log, as JSON that clients write by hand.

    {"log": "clicks"}                                          all readable records
    {"log": "clicks", "start": {"latest": true}, "follow": true}
    {"log": "clicks", "start": {"dlsn": "3:17:0"}, "end": {"dlsn": "9:0:0"}, "columns": ["value"]}

Ranges are half-open.  A position without a record means the next record.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime  # msgspec reads it when it decodes
from typing import Annotated, TypeAlias

import msgspec

from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN, TXID_MAX, LogId, validate_log_name
from dlcore.base.proto import flight_pb2 as pb
from dlcore.base.records import NotLessThan, RecordField
from dlcore.flight.requests import MALFORMED

FORMAT = 1
TICKET_BYTES_MAX = 64 * 1024
"""Longest ticket: it names columns, and a log may have many columns."""
_SHOWN_BYTES = 200
_Number = Annotated[int, msgspec.Meta(ge=0, le=TXID_MAX)]
_Time = Annotated[datetime, msgspec.Meta(tz=True)]


@dataclass(frozen=True, slots=True)
class Latest:
    """The end of the readable records at the time of the request."""


Wanted: TypeAlias = DLSN | NotLessThan | Latest
"""A position in a ticket."""


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
            raise ConfigurationError(
                f"position {msgspec.json.encode(self).decode()}: expected one of dlsn, txid, time, "
                "sequence_id and latest"
            )
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
    """A request for records.

    `format` is the version of the ticket's format; clients leave it out.

    Attributes:
        log: The name of the log.
        log_id: The ticket is for the log of this id only: under any later name, and not for a new
            log of the same name. `GetFlightInfo` returns it.
        start: The position of the first wanted record. Without it, the first record that is not
            truncated.
        end: The position of the first record that is not wanted. Without it, the end of the
            readable records, or no end with `follow`.
        follow: With true, the stream goes on with later records. An `end` must then be a `dlsn`.
        columns: The names of the wanted columns. Without it, all columns of a byte log, or those of
            the typed log's schema.
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
            raise ConfigurationError(
                "with follow, expected no end, or an end that is a dlsn, not "
                f"{msgspec.json.encode(self.end).decode()}"
            )

    def encode(self) -> bytes:
        """Return the ticket as clients send it."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """Parse a client's ticket.  Raises: ConfigurationError: it is invalid."""
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
    """Return `time` in milliseconds since the epoch, rounded up, so that no earlier one matches."""
    seconds, microseconds = int(time.replace(microsecond=0).timestamp()), time.microsecond
    return seconds * 1000 + -(-microseconds // 1000)


def ticket_of(descriptor: pb.FlightDescriptor) -> Ticket:
    """Return the ticket of a descriptor: a path is the name of a log, a command is a ticket.

    Raises: ConfigurationError: it is neither.
    """
    if descriptor.type == pb.FlightDescriptor.CMD:
        return Ticket.decode(descriptor.cmd)
    if descriptor.type == pb.FlightDescriptor.PATH:
        return Ticket(log="/".join(descriptor.path))
    raise ConfigurationError(
        "a descriptor without a type: expected a path, which names a log, or a command, which is a "
        "ticket"
    )
