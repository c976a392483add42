"""Messages of DoPut are taken when they are whole, and refused with words when they are not."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.message import DecodeError

from dlcore.base.errors import ConfigurationError, InvalidLogNameError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight import put
from dlcore.flight.put import (
    COPIED_BYTES_MAX,
    ROWS_MAX,
    PutDecoder,
    PutMessage,
    PutTarget,
    StagingTarget,
    log_of,
    parse_schema,
    parse_target,
)
from dlcore.flight.sending import framed
from tests.fixtures import served_proxies

BATCH = pa.record_batch({"value": [b"one", b"two", b""], "txid": [1, 2, 3]})


def parsed(data: pb.FlightData) -> PutMessage:
    """Return a message as a proxy takes it."""
    return PutMessage.parse(data.SerializeToString())


def data_of(buffer: pa.Buffer, **fields: Any) -> PutMessage:
    """Return an Arrow message, with other fields than it has."""
    data = served_proxies.data_of(buffer)
    for name, value in fields.items():
        setattr(data, name, value)
    return parsed(data)


def decoder_of(schema: pa.Schema) -> PutDecoder:
    """Return the decoder of a stream with this schema."""
    return PutDecoder(data_of(schema.serialize()))


def path(*parts: str) -> pb.FlightDescriptor:
    """Return the descriptor of a path."""
    return pb.FlightDescriptor(type=pb.FlightDescriptor.PATH, path=parts)


def command(text: bytes) -> pb.FlightDescriptor:
    """Return the descriptor of a command."""
    return pb.FlightDescriptor(type=pb.FlightDescriptor.CMD, cmd=text)


def test_a_path_or_a_command_names_the_log() -> None:
    """A path may come in parts."""
    for descriptor in (path("a/b"), path("a", "b"), command(b'{"log": "/a/b"}')):
        assert parse_target(descriptor) == PutTarget("a/b")
    staged = parse_target(command(b'{"staging": "job", "shared": true}'))
    assert staged == StagingTarget("job", shared=True)


@pytest.mark.parametrize(
    ("descriptor", "error", "problem"),
    [
        (pb.FlightDescriptor(), ConfigurationError, "has no descriptor"),
        (path(), InvalidLogNameError, "it is empty"),
        (path("a//b"), InvalidLogNameError, "a//b"),
        (command(b""), ConfigurationError, 'expected JSON like {"log": "clicks"}'),
        (command(b"\xff\xfe"), ConfigurationError, "the descriptor's command"),
        (command(b'{"log": "a", "speed": 3}'), ConfigurationError, "unknown field `speed`"),
        (command(b'{"log": ".a"}'), InvalidLogNameError, "reserved"),
    ],
)
def test_a_batch_that_names_no_log_is_refused(
    descriptor: pb.FlightDescriptor, error: type[ConfigurationError], problem: str
) -> None:
    """The error says what was expected."""
    with pytest.raises(error, match=problem):
        parse_target(descriptor)


def test_a_batch_is_what_was_sent() -> None:
    """Also one without rows."""
    decoder = decoder_of(BATCH.schema)
    assert decoder.decode(data_of(BATCH.serialize())).equals(BATCH)
    empty = BATCH.slice(0, 0)
    assert decoder.decode(data_of(empty.serialize())).num_rows == 0


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (pa.dictionary(pa.int8(), pa.string()), "dictionaries"),
        (pa.string_view(), "views"),
        (pa.binary_view(), "views"),
        (pa.list_view(pa.int8()), "views"),
        (pa.large_list_view(pa.int8()), "views and run-end encoding"),
        (pa.run_end_encoded(pa.int32(), pa.int8()), "views and run-end encoding"),
        (pa.null(), "null has no values"),
        (pa.struct([("inner", pa.list_(pa.string_view()))]), "views"),
    ],
)
def test_a_type_that_grows_when_it_is_read_is_refused(kind: pa.DataType, problem: str) -> None:
    """It may stand inside of others."""
    with pytest.raises(ConfigurationError, match=f"column 'c': .*{problem}"):
        decoder_of(pa.schema([("ok", pa.int64()), ("c", kind)]))


def test_compressed_batches_are_refused() -> None:
    """Four MiB of them may be gigabytes."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, BATCH.schema, options=options) as writer:
        writer.write_batch(BATCH)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    compressed = data_of(reader.read_next_message().serialize())
    with pytest.raises(ConfigurationError, match="compressed"):
        decoder_of(BATCH.schema).decode(compressed)


def test_rows_without_bytes_are_counted() -> None:
    """Structs without fields have as many rows as the message says."""
    schema = pa.schema([("nothing", pa.struct([]))])
    column = pa.StructArray.from_buffers(schema.field(0).type, ROWS_MAX + 1, [None], children=[])
    batch = pa.RecordBatch.from_arrays([column], schema=schema)
    with pytest.raises(ConfigurationError, match=f"{ROWS_MAX + 1} rows: send at most"):
        decoder_of(schema).decode(data_of(batch.serialize()))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"data_header": b""}, "without an Arrow message, expected a record batch"),
        ({"data_header": b"junk" * 20}, "an Arrow message does not parse"),
        ({"data_body": b"short"}, "Expected to be able to read"),
        ({"data_body": bytes(10_000)}, "but 10000 were sent"),
    ],
)
def test_a_batch_that_is_not_whole_is_refused(fields: dict[str, bytes], problem: str) -> None:
    """Header and body must be each other's."""
    with pytest.raises(ConfigurationError, match=problem):
        decoder_of(BATCH.schema).decode(data_of(BATCH.serialize(), **fields))


def test_a_header_that_was_seen_tells_nothing_of_the_next_body() -> None:
    """Each batch is as whole as the first one has to be, and kept apart from it."""
    decoder, data = decoder_of(BATCH.schema), data_of(BATCH.serialize())
    header, body = data.data.data_header, bytes(data.body)
    for _ in range(2):
        assert decoder.decode(data).equals(BATCH)
    for other in (body[:-8], body + bytes(8), body[:8] + b"\xff" * 8 + body[16:]):
        with pytest.raises(ConfigurationError, match=r"does not parse|says that"):
            decoder.decode(parsed(pb.FlightData(data_header=header, data_body=other)))
    another = pa.record_batch({"value": [b"uno", b"due", b""], "txid": [4, 5, 6]})
    assert decoder.decode(data_of(another.serialize())).equals(another)
    assert decoder.decode(data_of(another.slice(1).serialize())).equals(another.slice(1))


def test_messages_of_another_kind_are_refused() -> None:
    """A schema is no batch, and a batch no schema."""
    with pytest.raises(ConfigurationError, match="kind schema, expected a record batch"):
        decoder_of(BATCH.schema).decode(data_of(BATCH.schema.serialize()))
    with pytest.raises(ConfigurationError, match="kind record batch, expected a schema"):
        PutDecoder(data_of(BATCH.serialize()))
    with pytest.raises(ConfigurationError, match="expected a schema"):
        PutDecoder(parsed(pb.FlightData(flight_descriptor=path("a"))))


def test_a_schema_that_does_not_parse_is_refused() -> None:
    """Names are text."""
    schema = BATCH.schema.serialize()
    header = data_of(schema).data.data_header.replace(b"value", b"va\xff\xfee")
    with pytest.raises(ConfigurationError, match="the schema does not parse"):
        PutDecoder(data_of(schema, data_header=header))


def test_a_schema_of_its_own_is_read_back() -> None:
    """As an action takes it: the message alone."""
    assert parse_schema(BATCH.schema.serialize().to_pybytes()) == BATCH.schema
    with pytest.raises(ConfigurationError, match="the schema does not parse"):
        parse_schema(b"no schema")


def test_a_staged_batch_names_its_log() -> None:
    """Each for itself: one stream stages for many logs."""
    batch = BATCH.serialize()
    assert log_of(data_of(batch, app_metadata=b'{"log": "/a/b"}')) == "a/b"
    for beside in (b"", b"\xff", b"{}", b'{"log": 3}'):
        with pytest.raises(ConfigurationError, match=r'expected JSON like \{"log": "clicks"\}'):
            log_of(data_of(batch, app_metadata=beside))
    with pytest.raises(InvalidLogNameError, match="reserved"):
        log_of(data_of(batch, app_metadata=b'{"log": ".a"}'))


def test_offsets_that_lead_elsewhere_are_refused() -> None:
    """They would be followed without a look."""
    body = bytearray(data_of(BATCH.serialize()).body)
    body[8:12] = (2**30).to_bytes(4, "little")  # the third of four offsets
    with pytest.raises(ConfigurationError, match="the batch does not parse"):
        decoder_of(BATCH.schema).decode(data_of(BATCH.serialize(), data_body=bytes(body)))


def test_random_damage_never_gets_through_as_another_error() -> None:
    """Bytes of schema, header and body are changed at random: a batch, or a refusal."""
    rng = random.Random(3)
    schema, data = data_of(BATCH.schema.serialize()), data_of(BATCH.serialize())
    refused = 0
    for _ in range(3000):
        parts = [bytearray(p) for p in (schema.data.data_header, data.data.data_header, data.body)]
        part = rng.choice(parts)
        for _ in range(rng.randrange(1, 4)):
            part[rng.randrange(len(part))] = rng.randrange(256)
        first, header, body = map(bytes, parts)
        try:
            decoder = PutDecoder(parsed(pb.FlightData(data_header=first)))
            damaged = parsed(pb.FlightData(data_header=header, data_body=body))
            decoder.decode(damaged).to_pylist()
        except ConfigurationError:
            refused += 1
    assert refused > 1000


HEADER, BESIDE, BODY = b"\x12\x02hh", b"\x1a\x01{", b"\xc2\x3e\x03abc"
"""Fields of FlightData as they travel."""


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (HEADER + BESIDE + BODY, b"abc"),
        (BODY + HEADER + BESIDE, b"abc"),
        (HEADER + b"\xc2\x3e\x01x" + BESIDE + BODY, b"abc"),  # the last one counts
        (HEADER + BESIDE, b""),
        (b"\x20\x07" + HEADER + BESIDE + BODY, b"abc"),  # an unknown number
        (HEADER + BESIDE * 9 + BODY, b"abc"),
        (b"\xc2\xbe\x80\x80\x00\x00" + HEADER + BESIDE, b""),  # a long way to say a thousand
    ],
)
@pytest.mark.parametrize("copied_bytes_max", [0, COPIED_BYTES_MAX])
def test_a_message_is_what_the_protobuf_library_says_of_it(
    data: bytes, body: bytes, copied_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever its body stands, whatever stands beside it, and whether it counts as long."""
    monkeypatch.setattr(put, "COPIED_BYTES_MAX", copied_bytes_max)
    message, whole = PutMessage.parse(data), pb.FlightData.FromString(data)
    assert bytes(message.body) == whole.data_body == body
    assert message.data.data_header == whole.data_header == b"hh"
    assert message.data.app_metadata == whole.app_metadata == b"{"


def test_a_body_that_comes_last_is_not_copied() -> None:
    """It is a view into what came, if it is long."""
    data = framed(pa.record_batch({"value": [bytes(COPIED_BYTES_MAX)]}).serialize(), b"")
    assert PutMessage.parse(data).body.obj is data


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 4_000_000,
        b"\x12\xff\xff\xff\xff\x0f",
        b"\xc2\x3e\x04abc",
        b"\x12",
        b"\x0a\x01x" + BODY,
    ],
)
@pytest.mark.parametrize("copied_bytes_max", [0, COPIED_BYTES_MAX])
def test_bytes_that_are_no_message_are_refused(
    data: bytes, copied_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon, however long it is."""
    monkeypatch.setattr(put, "COPIED_BYTES_MAX", copied_bytes_max)
    with pytest.raises(ConfigurationError, match="a message is no FlightData"):
        PutMessage.parse(data)


def test_messages_cut_and_changed_at_random_are_taken_as_the_protobuf_library_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Either both refuse one, or both have the same fields."""
    monkeypatch.setattr(put, "COPIED_BYTES_MAX", 0)
    rng = random.Random(5)
    whole = served_proxies.data_of(BATCH.serialize()).SerializeToString()
    refused = 0
    for _ in range(3000):
        data = bytearray(whole[: rng.choice((len(whole), rng.randrange(len(whole))))])
        for _ in range(rng.randrange(3)):
            if data:
                data[rng.randrange(min(len(data), 20))] = rng.randrange(256)
        try:
            expected = pb.FlightData.FromString(bytes(data))
        except DecodeError:
            refused += 1
            with pytest.raises(ConfigurationError):
                PutMessage.parse(bytes(data))
            continue
        message = PutMessage.parse(bytes(data))
        assert bytes(message.body) == expected.data_body
        assert message.data.data_header == expected.data_header
    assert refused > 300
