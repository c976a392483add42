"""What a client sends by DoPut: first what it writes to and the schema, then record batches.

Everything is checked before anybody computes with it: what does not parse, does not fit its own
lengths, or could become much larger than it is on the wire, is a ConfigurationError that says so.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import pyarrow as pa

from dlcore.errors import ConfigurationError
from dlcore.ids import DLSN, validate_log_name
from dlcore.log.entries.stamp import Claim
from dlcore.proto import flight_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS_MAX = 1 << 20
"""Rows of one message: columns of some types have them without a byte."""
_PREFIX = struct.Struct("<Ii")  # of an encapsulated message: a mark, and how long the header is
_MARK = 0xFFFFFFFF
_ALIGNMENT = 8
_UNREADABLE = (pa.ArrowException, OSError, EOFError, ValueError)
_HEADER_OF_MESSAGE = 2  # in the flatbuffer's table Message
_COMPRESSION_OF_BATCH = 3  # in its table RecordBatch


class PutTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream writes to, and how.

    `producer` is who numbers its records: a name begins a new incarnation, a claim goes on with one
    that was begun.  With `expected`, the position of the log's last record (null: it has none), all
    of the stream is written if that is so, and else nothing; it comes in one message.  `positions`
    asks to be told where each batch is.
    """

    log: str
    producer: str | Claim | None = None
    expected: str | msgspec.UnsetType | None = msgspec.UNSET
    positions: bool = False


class StagingTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """That a stream stages, under which identity, and whether other streams share its ledgers."""

    staging: str
    shared: bool = False


class Staged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes beside a batch that is staged: the log that it is for."""

    log: str


class Numbered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes beside a batch of a producer: the sequence of its first record."""

    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**62)]


def sequence_of(data: pb.FlightData) -> int | None:
    """Return the sequence that a message tells, None if it tells none.

    Raises:
        ConfigurationError: what goes beside its batch is something else.
    """
    if not data.app_metadata:
        return None
    try:
        return msgspec.json.decode(data.app_metadata, type=Numbered).sequence
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f'what goes beside a batch: {error}; expected JSON like {{"sequence": 17}}'
        ) from error


def log_of(data: pb.FlightData) -> str:
    """Return the log that a batch is staged for.

    Raises:
        ConfigurationError: none is told beside it; InvalidLogNameError: of the log.
    """
    try:
        told = msgspec.json.decode(data.app_metadata, type=Staged)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
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
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f'the descriptor\'s command: {error}; expected JSON like {{"log": "clicks"}}'
            ) from error
        if isinstance(target.expected, str):
            DLSN.parse(target.expected)  # refuses another text
        return msgspec.structs.replace(target, log=validate_log_name(target.log))
    raise ConfigurationError(
        "the first message has no descriptor, expected the path of a log or a command"
    )


def parse_schema(message: bytes) -> pa.Schema:
    """Return the schema of an Arrow message.  Raises: ConfigurationError: it is none."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(message))
    except _UNREADABLE as error:
        raise ConfigurationError(f"the schema does not parse: {error}") from error


class PutDecoder:
    """Makes record batches of one stream's messages, the first of which has its schema.

    Raises:
        ConfigurationError: the first message has none, or one that a stream cannot have.
    """

    def __init__(self, first: pb.FlightData) -> None:
        message = _message_of(first, "schema")
        try:
            self.schema: pa.Schema = pa.ipc.read_schema(message)
            names = self.schema.names  # which are bytes until they are asked for
        except _UNREADABLE as error:
            raise ConfigurationError(f"the schema does not parse: {error}") from error
        for name, kind in zip(names, self.schema.types, strict=True):
            for each in _kinds_in(kind):
                if why := _problem_of(each):
                    raise ConfigurationError(f"column {name!r}: {why}")

    def decode(self, data: pb.FlightData) -> pa.RecordBatch:
        """Return the batch of a message.

        Raises:
            ConfigurationError: it has none that is whole.
        """
        message = _message_of(data, "record batch")
        if _is_compressed(data.data_header):
            raise ConfigurationError("the batch's buffers are compressed: send them as they are")
        try:
            batch = pa.ipc.read_record_batch(message, self.schema)
            if batch.num_rows <= ROWS_MAX:
                batch.validate(full=True)
        except _UNREADABLE as error:
            raise ConfigurationError(f"the batch does not parse: {error}") from error
        if batch.num_rows > ROWS_MAX:
            raise ConfigurationError(f"a batch of {batch.num_rows} rows: send at most {ROWS_MAX}")
        return batch


def _message_of(data: pb.FlightData, kind: str) -> pa.ipc.Message:
    """Return the Arrow message of this kind that a message of Flight carries in two parts."""
    header, body = data.data_header, data.data_body
    if not header:
        raise ConfigurationError(f"a message without an Arrow message, expected a {kind}")
    padding = -(_PREFIX.size + len(header)) % _ALIGNMENT
    prefix = _PREFIX.pack(_MARK, len(header) + padding)
    try:
        message = pa.ipc.read_message(b"".join((prefix, header, bytes(padding), body)))
    except _UNREADABLE as error:
        raise ConfigurationError(f"an Arrow message does not parse: {error}") from error
    if message.type != kind:
        raise ConfigurationError(f"an Arrow message of kind {message.type}, expected a {kind}")
    if (message.body.size if message.body is not None else 0) != len(body):
        raise ConfigurationError(
            f"a {kind} says that its body has {message.body.size} bytes, it came with {len(body)}"
        )
    return message


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
