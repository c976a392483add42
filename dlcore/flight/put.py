"""The messages of DoPut: first the target of a client and its schema, then record batches.

Everything is checked before anybody computes with it: what does not parse, does not fit its own
lengths, or could become much larger than it is on the wire, is a ConfigurationError that says so.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import pyarrow as pa

from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN, LogId, validate_log_name
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.requests import MALFORMED, parsed
from dlcore.log.entries.stamp import Claim

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS_MAX = 1 << 20
"""Rows of one message: columns of some types have them without a byte."""
COPIED_BYTES_MAX = 8 * 1024
"""To copy the body of a message that is no longer costs less than to look for it."""
UNREACHABLE_MAX = 16
"""Locations that a client may name; of more it forgets the oldest."""
_PREFIX = struct.Struct("<Ii")  # of an encapsulated message: a mark, and how long the header is
_MARK = 0xFFFFFFFF
_ALIGNMENT = 8
_SEEN_BYTES_MAX = 4096  # of a header that a stream keeps
_BODY_TAG = 1000 << 3 | 2
_BYTES_KIND = 2  # of a field of protobuf
_FIELDS_MAX = 4  # that FlightData has
_NUMBER_BITS = 35  # as many as lengths may have there
_HEADER_OF_MESSAGE = 2  # in the flatbuffer's table Message
_COMPRESSION_OF_BATCH = 3  # in its table RecordBatch


class PutTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a stream writes to, and how.

    With `log_id` it writes to that log alone, and to no other one that was created under its name.
    `producer` is who numbers its records: a name begins a new incarnation, a claim goes on with one
    that was begun.  With `expected`, the position of the log's last record (null: it has none), all
    of the stream is written if that is so, and else nothing; it comes in one message.  `positions`
    asks to be told where each batch is.  `unreachable` are locations to which the client was
    sent, and which it did not reach.
    """

    log: str
    log_id: LogId | None = None
    producer: str | Claim | None = None
    expected: str | msgspec.UnsetType | None = msgspec.UNSET
    positions: bool = False
    unreachable: Annotated[tuple[str, ...], msgspec.Meta(max_length=UNREACHABLE_MAX)] = ()


class StagingTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """That a stream stages, under which identity, and whether other streams share its ledgers.

    With `round` all appends of what streams of lower rounds staged are decided or given up.
    """

    staging: str
    shared: bool = False
    round: Annotated[int, msgspec.Meta(ge=0)] = 0


class Staged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes beside a batch that is staged: the log that it is for."""

    log: str


class Numbered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes beside a batch of a producer: the sequence of its first record."""

    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**62)]


@dataclass(frozen=True, slots=True)
class PutMessage:
    """What is sent either way: FlightData of flight.proto without its body, and that beside it.

    The protobuf library copies a body three times until it is an Arrow buffer.
    """

    told: pb.FlightData
    body: memoryview

    @classmethod
    def parse(cls, data: bytes) -> PutMessage:
        """Return a message, whose body is not copied if it is long and comes last.

        Raises:
            ConfigurationError: it is none.
        """
        if len(data) > COPIED_BYTES_MAX:
            start, body_at = _find_last_body(data)
            if start < body_at:
                return cls(parsed(pb.FlightData, data[:start]), memoryview(data)[body_at:])
        told = parsed(pb.FlightData, data)
        return cls(told, memoryview(told.data_body))


def _find_last_body(data: bytes) -> tuple[int, int]:
    """Return where the field begins that is a body and ends with the message, and the body itself.

    Both are the same where there is none, or what is in front of it is unusual: the protobuf
    library knows more about that.
    """
    at, size = 0, len(data)
    with contextlib.suppress(IndexError):
        for _ in range(_FIELDS_MAX):
            start = at
            tag, at = _varint(data, at)
            length, at = _varint(data, at)
            if tag == _BODY_TAG and at + length == size:
                return start, at
            if tag & 7 != _BYTES_KIND:
                break
            at += length
    return size, size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at this place, and where it ends.  Raises: IndexError: none ends there."""
    value = 0
    for shift in range(0, _NUMBER_BITS, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError


def sequence_of(message: PutMessage) -> int | None:
    """Return the sequence that a message tells, None if it tells none.

    Raises:
        ConfigurationError: what goes beside its batch is something else.
    """
    beside = message.told.app_metadata
    if not beside:
        return None
    try:
        return msgspec.json.decode(beside, type=Numbered).sequence
    except MALFORMED as error:
        raise ConfigurationError(
            f'what goes beside a batch: {error}; expected JSON like {{"sequence": 17}}'
        ) from error


def log_of(message: PutMessage) -> str:
    """Return the log that a batch is staged for.

    Raises:
        ConfigurationError: none is told beside it; InvalidLogNameError: of the log.
    """
    try:
        told = msgspec.json.decode(message.told.app_metadata, type=Staged)
    except MALFORMED as error:
        raise ConfigurationError(
            f'what goes beside a batch that is staged: {error}; expected JSON like {{"log": '
            '"clicks"}'
        ) from error
    return validate_log_name(told.log)


def parse_target(descriptor: pb.FlightDescriptor) -> PutTarget | StagingTarget:
    """Return what a descriptor names: a log by its path, or what a command says in JSON.

    Raises:
        ConfigurationError: neither; InvalidLogNameError: of the log.
    """
    if descriptor.type == pb.FlightDescriptor.PATH:
        return PutTarget(validate_log_name("/".join(descriptor.path)))
    if descriptor.type == pb.FlightDescriptor.CMD:
        try:
            told = msgspec.json.decode(descriptor.cmd)
            if isinstance(told, dict) and "staging" in told:
                return msgspec.convert(told, StagingTarget)
            target = msgspec.convert(told, PutTarget)
        except MALFORMED as error:
            raise ConfigurationError(
                f'the descriptor\'s command: {error}; expected JSON like {{"log": "clicks"}}'
            ) from error
        if isinstance(target.expected, str):
            DLSN.parse(target.expected)  # refuses another text
        return msgspec.structs.replace(target, log=validate_log_name(target.log))
    raise ConfigurationError(
        "the first message has no descriptor, expected the path of a log or a command"
    )


def _unreadable() -> tuple[type[Exception], ...]:
    # Asked for where something fails: pyarrow takes long to load, and many commands need it never.
    return (pa.ArrowException, OSError, EOFError, ValueError)


def parse_schema(message: bytes) -> pa.Schema:
    """Return the schema of an Arrow message.  Raises: ConfigurationError: it is none."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(message))
    except _unreadable() as error:
        raise ConfigurationError(f"the schema does not parse: {error}") from error


class PutDecoder:
    """Makes record batches of one stream's messages, the first of which has its schema.

    Messages with as many rows, as long together, have the same header: it is looked at once.

    Raises:
        ConfigurationError: the first message has none, or one that a stream cannot have.
    """

    def __init__(self, first: PutMessage) -> None:
        header = first.told.data_header
        arrow = _encapsulated(header, first.body, "schema")
        _check_whole(arrow, first.body, "schema")
        try:
            self.schema: pa.Schema = pa.ipc.read_schema(pa.py_buffer(arrow))
            names = self.schema.names  # which are bytes until they are asked for
        except _unreadable() as error:
            raise ConfigurationError(f"the schema does not parse: {error}") from error
        for name, kind in zip(names, self.schema.types, strict=True):
            for each in _kinds_in(kind):
                if why := _problem_of(each):
                    raise ConfigurationError(f"column {name!r}: {why}")
        self._seen: tuple[bytes, int] | None = None  # a header that is good for so long a body

    def decode(self, message: PutMessage) -> pa.RecordBatch:
        """Return the batch of a message.

        Raises:
            ConfigurationError: it has none that is whole.
        """
        header, body = message.told.data_header, message.body
        arrow = _encapsulated(header, body, "record batch")
        if self._seen != (header, len(body)):
            _check_whole(arrow, body, "record batch")
            if _is_compressed(header):
                raise ConfigurationError(
                    "the batch's buffers are compressed: send them as they are"
                )
            self._seen = (header, len(body)) if len(header) <= _SEEN_BYTES_MAX else None
        try:
            batch = pa.ipc.read_record_batch(arrow, self.schema)
            if batch.num_rows <= ROWS_MAX:
                batch.validate(full=True)
        except _unreadable() as error:
            raise ConfigurationError(f"the batch does not parse: {error}") from error
        if batch.num_rows > ROWS_MAX:
            raise ConfigurationError(f"a batch of {batch.num_rows} rows: send at most {ROWS_MAX}")
        return batch


def _encapsulated(header: bytes, body: memoryview, kind: str) -> bytes:
    """Return the two parts of an Arrow message that a message of Flight carries as one."""
    if not header:
        raise ConfigurationError(f"a message without an Arrow message, expected a {kind}")
    padding = -(_PREFIX.size + len(header)) % _ALIGNMENT
    prefix = _PREFIX.pack(_MARK, len(header) + padding)
    # This copy is needed: bodies may be anywhere in messages, and Arrow's are aligned.
    return b"".join((prefix, header, bytes(padding), body))


def _check_whole(data: bytes, body: memoryview, kind: str) -> None:
    """Raise unless an Arrow message is of this kind, and says of its body what it has."""
    try:
        arrow = pa.ipc.read_message(data)
    except _unreadable() as error:
        raise ConfigurationError(f"an Arrow message does not parse: {error}") from error
    if arrow.type != kind:
        raise ConfigurationError(f"an Arrow message of kind {arrow.type}, expected a {kind}")
    if (arrow.body.size if arrow.body is not None else 0) != len(body):
        raise ConfigurationError(
            f"a {kind} says that its body has {arrow.body.size} bytes, it came with {len(body)}"
        )


def _is_compressed(header: bytes) -> bool:
    """Return whether the batch of a header, which is a valid flatbuffer, is compressed."""

    def field(table: int, number: int) -> int:
        """Return where a field of the table at this place is, 0 if it is left out."""
        fields = table - int(struct.unpack_from("<i", header, table)[0])
        size = struct.unpack_from("<H", header, fields)[0]
        entry = 4 + 2 * number
        offset = struct.unpack_from("<H", header, fields + entry)[0] if entry < size else 0
        return table + int(offset) if offset else 0

    def target(place: int) -> int:
        return place + int(struct.unpack_from("<I", header, place)[0])

    batch = target(field(target(0), _HEADER_OF_MESSAGE))
    return field(batch, _COMPRESSION_OF_BATCH) != 0


def _kinds_in(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield a type, and those in it."""
    yield kind
    for number in range(kind.num_fields):
        yield from _kinds_in(kind.field(number).type)


def _problem_of(kind: Any) -> str | None:
    """Return why batches cannot have values of this type, if so."""
    types = pa.types
    if types.is_dictionary(kind):
        return "dictionaries are not taken, send the values themselves"
    if types.is_binary_view(kind) or types.is_string_view(kind) or types.is_list_view(kind):
        return "views are not taken, send the plain type"
    if types.is_large_list_view(kind) or types.is_run_end_encoded(kind):
        return "views and runs are not taken, send the plain type"
    if types.is_null(kind):
        return "nulls have no values"
    return None
