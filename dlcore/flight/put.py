"""The messages of DoPut: first the target of a client and its schema, then record batches.

Every message is checked before it is used.  A message that does not parse, contradicts its own
lengths, or could become much larger than it is on the wire raises a ConfigurationError.
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
"""Most rows of one message.  Columns of some types have rows without any byte, so that the size of
a message does not bound them."""
COPIED_BYTES_MAX = 8 * 1024
"""Up to this size, a copy of the message costs less than the search for its body."""
UNREACHABLE_MAX = 16
"""Most unreachable locations in a request; a client with more of them drops the oldest."""
_PREFIX = struct.Struct("<Ii")  # of an encapsulated message: a marker, and the header's length
_MARK = 0xFFFFFFFF
_ALIGNMENT = 8
_SEEN_BYTES_MAX = 4096  # largest header that a stream keeps
_BODY_TAG = 1000 << 3 | 2
_BYTES_KIND = 2  # wire type of a protobuf field of bytes
_FIELDS_MAX = 4  # number of fields of FlightData
_NUMBER_BITS = 35  # most bits of a length in protobuf
_HEADER_OF_MESSAGE = 2  # number of the field in the flatbuffer's table Message
_COMPRESSION_OF_BATCH = 3  # number of the field in its table RecordBatch


class PutTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The log that a stream writes to, and its options.

    A condition, `expected`, is for a stream of one message.

    Attributes:
        log: The name of the log.
        log_id: Write to the log of this id only. NOT_FOUND says that it was deleted, or has another
            name.
        producer: Number the records, so that each is written
            [once](proxy-producers.md#producers). A name begins a new incarnation, a claim continues
            one.
        expected: Write only if the log has this
            [last record](proxy-producers.md#conditional-appends); null: only if it is empty.
        positions: With true, acknowledgements have `ends`.
        unreachable: Up to 16 locations that an answer named and that the client did not reach.
    """

    log: str
    log_id: LogId | None = None
    producer: str | Claim | None = None
    expected: str | msgspec.UnsetType | None = msgspec.UNSET
    positions: bool = False
    unreachable: Annotated[tuple[str, ...], msgspec.Meta(max_length=UNREACHABLE_MAX)] = ()


class StagingTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The identity under which a stream stages; with `shared` it shares ledgers with other streams.

    A client that sends `round` promises that all appends of lower rounds are committed or given up.
    """

    staging: str
    shared: bool = False
    round: Annotated[int, msgspec.Meta(ge=0)] = 0


class Staged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata of a staged batch: its log."""

    log: str


class Numbered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata of a producer's batch: the sequence of its first record."""

    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**62)]


@dataclass(frozen=True, slots=True)
class PutMessage:
    """A message of Flight: FlightData of flight.proto without its body, and the body.

    They are apart because the protobuf library would copy the body three times on its way to an
    Arrow buffer.
    """

    data: pb.FlightData
    body: memoryview

    @classmethod
    def parse(cls, data: bytes) -> PutMessage:
        """Parse a message; its body is not copied if it is long and comes last.

        Raises:
            ConfigurationError: the message is invalid.
        """
        if len(data) > COPIED_BYTES_MAX:
            start, body_at = _find_last_body(data)
            if start < body_at:
                return cls(parsed(pb.FlightData, data[:start]), memoryview(data)[body_at:])
        whole = parsed(pb.FlightData, data)
        return cls(whole, memoryview(whole.data_body))


def _find_last_body(data: bytes) -> tuple[int, int]:
    """Return the offsets of the field with the body and of the body, if it is the last field.

    Both are equal if there is no such body, or unusual fields come before it; the protobuf library
    then parses the whole message.
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
    """Return the number at offset `at`, and the offset behind it; raise `IndexError` at the end."""
    value = 0
    for shift in range(0, _NUMBER_BITS, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError


def sequence_of(message: PutMessage) -> int | None:
    """Return the sequence in a message's metadata, None if there is none.

    Raises:
        ConfigurationError: the metadata is invalid.
    """
    beside = message.data.app_metadata
    if not beside:
        return None
    try:
        return msgspec.json.decode(beside, type=Numbered).sequence
    except MALFORMED as error:
        raise ConfigurationError(
            f'app_metadata of a batch: {error}; expected JSON like {{"sequence": 17}}'
        ) from error


def log_of(message: PutMessage) -> str:
    """Return the log that a batch is staged for.

    Raises:
        ConfigurationError: the metadata has no log; InvalidLogNameError.
    """
    try:
        staged = msgspec.json.decode(message.data.app_metadata, type=Staged)
    except MALFORMED as error:
        raise ConfigurationError(
            f'app_metadata of a staged batch: {error}; expected JSON like {{"log": "clicks"}}'
        ) from error
    return validate_log_name(staged.log)


def parse_target(descriptor: pb.FlightDescriptor) -> PutTarget | StagingTarget:
    """Return the target in a descriptor, which is the path of a log or a command in JSON.

    Raises:
        ConfigurationError: the descriptor is neither; InvalidLogNameError.
    """
    if descriptor.type == pb.FlightDescriptor.PATH:
        return PutTarget(validate_log_name("/".join(descriptor.path)))
    if descriptor.type == pb.FlightDescriptor.CMD:
        try:
            command = msgspec.json.decode(descriptor.cmd)
            if isinstance(command, dict) and "staging" in command:
                return msgspec.convert(command, StagingTarget)
            target = msgspec.convert(command, PutTarget)
        except MALFORMED as error:
            raise ConfigurationError(
                f'the descriptor\'s command: {error}; expected JSON like {{"log": "clicks"}}'
            ) from error
        if isinstance(target.expected, str):
            DLSN.parse(target.expected)  # raises if it is no position
        return msgspec.structs.replace(target, log=validate_log_name(target.log))
    raise ConfigurationError(
        "the first message has no descriptor, expected the path of a log or a command"
    )


def _unreadable() -> tuple[type[Exception], ...]:
    # A function, because pyarrow takes long to load, and many commands never need it.
    return (pa.ArrowException, OSError, EOFError, ValueError)


def parse_schema(message: bytes) -> pa.Schema:
    """Return the schema of an Arrow message.  Raises: ConfigurationError: it is invalid."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(message))
    except _unreadable() as error:
        raise ConfigurationError(f"the schema does not parse: {error}") from error


class PutDecoder:
    """Decodes the record batches of one stream, whose first message has the schema.

    Messages with equal numbers of rows and bytes often have equal headers.  A header is checked
    once.

    Raises:
        ConfigurationError: the first message has no schema, or has types that are not supported.
    """

    def __init__(self, first: PutMessage) -> None:
        header = first.data.data_header
        arrow = _encapsulated(header, first.body, "schema")
        _check_whole(arrow, first.body, "schema")
        try:
            self.schema: pa.Schema = pa.ipc.read_schema(pa.py_buffer(arrow))
            names = self.schema.names  # decodes the names, which may fail
        except _unreadable() as error:
            raise ConfigurationError(f"the schema does not parse: {error}") from error
        for name, kind in zip(names, self.schema.types, strict=True):
            for each in _kinds_in(kind):
                if why := _problem_of(each):
                    raise ConfigurationError(f"column {name!r}: {why}")
        self._seen: tuple[bytes, int] | None = None  # the last checked header, and its body's size

    def decode(self, message: PutMessage) -> pa.RecordBatch:
        """Return the batch of a message.

        Raises:
            ConfigurationError: the batch is invalid.
        """
        header, body = message.data.data_header, message.body
        arrow = _encapsulated(header, body, "record batch")
        if self._seen != (header, len(body)):
            _check_whole(arrow, body, "record batch")
            if _is_compressed(header):
                raise ConfigurationError(
                    "the batch's buffers are compressed: send them uncompressed"
                )
            self._seen = (header, len(body)) if len(header) <= _SEEN_BYTES_MAX else None
        try:
            batch = pa.ipc.read_record_batch(arrow, self.schema)
            # Validation takes time for each row, and rows of some types need no byte of the
            # message.
            if batch.num_rows <= ROWS_MAX:
                batch.validate(full=True)
        except _unreadable() as error:
            raise ConfigurationError(f"the batch does not parse: {error}") from error
        if batch.num_rows > ROWS_MAX:
            raise ConfigurationError(f"a batch of {batch.num_rows} rows: send at most {ROWS_MAX}")
        return batch


def _encapsulated(header: bytes, body: memoryview, kind: str) -> bytes:
    """Return header and body, which a message of Flight has apart, as one Arrow message."""
    if not header:
        raise ConfigurationError(f"a message without an Arrow message, expected a {kind}")
    padding = -(_PREFIX.size + len(header)) % _ALIGNMENT
    prefix = _PREFIX.pack(_MARK, len(header) + padding)
    # Copied, because Arrow needs an aligned body, and the body in a message may be unaligned.
    return b"".join((prefix, header, bytes(padding), body))


def _check_whole(data: bytes, body: memoryview, kind: str) -> None:
    """Raise unless an Arrow message is of this kind, and its stated body size is right."""
    try:
        arrow = pa.ipc.read_message(data)
    except _unreadable() as error:
        raise ConfigurationError(f"an Arrow message does not parse: {error}") from error
    if arrow.type != kind:
        raise ConfigurationError(f"an Arrow message of kind {arrow.type}, expected a {kind}")
    if (arrow.body.size if arrow.body is not None else 0) != len(body):
        raise ConfigurationError(
            f"a {kind} says that its body has {arrow.body.size} bytes, but {len(body)} were sent"
        )


def _is_compressed(header: bytes) -> bool:
    """Return whether the batch of a header, which is a valid flatbuffer, is compressed."""

    def field(table: int, number: int) -> int:
        """Return the offset of a field of the table at offset `table`, 0 if it is left out."""
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
    """Yield a type, and the types nested in it."""
    yield kind
    for number in range(kind.num_fields):
        yield from _kinds_in(kind.field(number).type)


def _problem_of(kind: Any) -> str | None:
    """Return why batches cannot have values of this type, None if they can."""
    types = pa.types
    if types.is_dictionary(kind):
        return "dictionaries are not supported, send the values themselves"
    if types.is_binary_view(kind) or types.is_string_view(kind) or types.is_list_view(kind):
        return "views are not supported, send the plain type"
    if types.is_large_list_view(kind) or types.is_run_end_encoded(kind):
        return "views and run-end encoding are not supported, send the plain type"
    if types.is_null(kind):
        return "the type null has no values, leave the column out"
    return None
