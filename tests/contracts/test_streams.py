"""Each method of a byte stream gives the same over all ways to it.

Goal: a log is a file that only grows, for whatever takes Python's files.
"""

from __future__ import annotations

import gzip
import io
import shutil
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    AlreadyTruncatedError,
    ConfigurationError,
    DLError,
    EndOfStreamError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.ways import Way

AS_FILES = pytest.mark.parametrize("way", ["blocking"], indirect=True)
"""Only the blocking streams are files of Python."""


def test_bytes_are_written_and_read(way: Way) -> None:
    """As of a file that only grows; a seek moves the reader."""
    log = way.new_log()
    with log.open_stream_writer() as stream:
        assert stream.tell() == 0
        stream.write(b"hello ")
        stream.write(b"world")
        stream.flush()
    with log.open_stream_writer() as stream:
        assert stream.tell() == 11
    with log.open_stream_reader() as stream:
        assert stream.read() == b"hello world"
        assert stream.tell() == 11
        assert stream.seek(6) == 6
        assert stream.read(3) == b"wor"
        assert stream.seek(-2, io.SEEK_END) == 9
        assert stream.read() == b"ld"
        with pytest.raises(ConfigurationError):
            stream.skip_to(-1)
    with log.open_stream_reader(8) as stream:
        assert stream.read() == b"rld"
        assert log.truncate(txid=7)
        for position in (0, 5):
            stream.seek(position)
            with pytest.raises(
                AlreadyTruncatedError, match=rf"bytes {position} … 5 were truncated"
            ):
                stream.read(1)
        assert stream.seek(7) == 7
        assert stream.read() == b"orld"
    with log.open_stream_reader() as stream, log.open_stream_writer() as writer:
        assert (stream.tell(), stream.read()) == (6, b"world")
        writer.write(b"!")
        writer.mark_end_of_stream()
        assert (stream.read(), stream.has_ended) == (b"!", True)
    records = way.new_log(5, 5)
    with pytest.raises(DLError, match=records.name):
        records.open_stream_reader(0).read()


def test_a_reader_skips_to_what_is_readable(way: Way) -> None:
    """Forward and back, and to the end; not to what is not there yet."""
    log = way.new_log()
    with log.open_stream_writer() as writer, log.open_stream_reader() as stream:
        assert stream.skip_to(0)
        assert not stream.skip_to(1)
        writer.write(b"0123")
        writer.write(b"456")
        writer.flush()
        for position in (5, 1, 4, 6, 7, 0):
            assert stream.skip_to(position)
            assert stream.tell() == position
            assert stream.read() == b"0123456"[position:]
        assert not stream.skip_to(8)
        assert stream.tell() == 7
        writer.write(b"789")
        writer.flush()
        assert stream.skip_to(8)
        assert stream.read(1) == b"8"


def test_at_the_end_there_is_nothing_until_more_is_written(way: Way) -> None:
    """Also past the end, and in a stream that is empty; a buffer is filled as far as it goes."""
    log = way.new_log()
    with log.open_stream_reader(5) as ahead, log.open_stream_reader() as stream:
        assert (stream.read(), stream.tell(), stream.has_ended) == (b"", 0, False)
        with log.open_stream_writer() as writer:
            writer.write(b"abc")
            writer.flush()
            buffer = bytearray(8)
            assert stream.readinto(buffer) == 3
            assert buffer == b"abc" + bytes(5)
            assert stream.readinto(buffer) == 0
            assert stream.readinto(bytearray()) == 0
            assert ahead.read() == b""
            writer.write(b"defg")
            writer.flush()
            assert stream.read(2) == b"de"
            assert (ahead.read(), ahead.tell()) == (b"fg", 7)


def test_the_end_of_a_sealed_stream(way: Way) -> None:
    """Reading there gives nothing, and says that nothing will come; skipping past it fails."""
    log = way.new_log()
    with log.open_stream_writer() as writer:
        writer.write(b"0123456")
        writer.mark_end_of_stream()
        assert writer.position == 7
    with log.open_stream_reader() as stream:
        assert (stream.read(4), stream.has_ended) == (b"0123", False)
        assert (stream.read(), stream.has_ended) == (b"456", True)
        assert stream.read() == b""
        assert stream.skip_to(7)
        assert stream.read() == b""
        with pytest.raises(EndOfStreamError, match="sealed and ends at 7, before 8"):
            stream.skip_to(8)
        assert stream.seek(100) == 100
        assert (stream.read(), stream.has_ended) == (b"", True)
        assert (stream.seek(3), stream.has_ended) == (3, False)
        assert stream.read(2) == b"34"
    with pytest.raises(EndOfStreamError):
        log.open_stream_writer()


@AS_FILES
def test_a_stream_is_a_file(way: Way, tmp_path: Path) -> None:
    """It takes and gives lines, compressed bytes and whole files, by what Python has for files."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 8_000)
    size = source.stat().st_size
    lines, copied, packed = way.new_log(), way.new_log(), way.new_log()
    with io.TextIOWrapper(io.BufferedWriter(lines.open_stream_writer()), newline="\n") as text:
        text.writelines(f"line {number} ä\n" for number in range(1000))
    with io.TextIOWrapper(io.BufferedReader(lines.open_stream_reader())) as found:
        assert [line.rstrip() for line in found] == [f"line {n} ä" for n in range(1000)]
    with copied.open_stream_writer() as stream, source.open("rb") as file:
        shutil.copyfileobj(file, stream, 300_000)
        assert (stream.tell(), stream.position) == (size, 0)
        assert repr(stream).startswith(f"<AppendOnlyStreamWriter at {size} of <LogWriter")
        stream.flush()
        assert stream.position == size
    with copied.open_stream_reader() as stream, target.open("wb") as file:
        shutil.copyfileobj(stream, file)
        assert stream.seek(-3, io.SEEK_END) == stream.tell() == size - 3
        assert stream.readall() == b"\xfd\xfe\xff"
        assert repr(stream) == f"<AppendOnlyStreamReader '{copied.name}' at {size}>"
    assert target.read_bytes() == source.read_bytes()
    with packed.open_stream_writer() as stream, gzip.open(stream, "wb") as zipped:
        zipped.write(b"packed" * 1000)
    with packed.open_stream_reader() as stream, gzip.open(io.BufferedReader(stream)) as zipped:
        assert zipped.read() == b"packed" * 1000


@AS_FILES
def test_the_life_of_a_stream(way: Way) -> None:
    """Flushed bytes stay, others may go; a closed stream says so, as a file does."""
    log = way.new_log()
    writer = log.open_stream_writer()
    assert writer.writable()
    assert not writer.readable()
    writer.write(b"kept")
    writer.flush()
    writer.write(b"gone")
    writer.abort()
    assert writer.closed
    for use in (writer.flush, writer.mark_end_of_stream, lambda: writer.write(b"x")):
        with pytest.raises(ValueError, match="closed file"):
            use()
    with log.open_stream_writer() as stream:
        assert stream.tell() == 4
    stream = log.open_stream_reader(2)
    assert stream.readable()
    assert stream.seekable()
    assert stream.readall() == b"pt"
    for _ in range(2):
        stream.close()
    for read in (stream.readall, lambda: stream.seek(0), lambda: stream.skip_to(0)):
        with pytest.raises(ValueError, match="closed file"):
            read()


@AS_FILES
def test_a_stream_is_closed_with_its_namespace(way: Way) -> None:
    """Its bytes are written then."""
    log, namespace = way.new_log(), way.open_another()
    left = namespace.open_log(log.name).open_stream_writer()
    left.write(b"written when its namespace closes")
    reading = namespace.open_log(log.name).open_stream_reader()
    namespace.close()
    with pytest.raises(AlreadyClosedError):
        reading.readall()
    with log.open_stream_reader() as stream:
        assert stream.readall() == b"written when its namespace closes"
