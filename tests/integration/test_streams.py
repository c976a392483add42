"""Byte streams as Python's binary files, on a real cluster."""

from __future__ import annotations

import gzip
import io
import shutil
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import AlreadyClosedError, EndOfStreamError
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from pathlib import Path


def test_a_stream_is_a_file(namespace_uri: str, tmp_path: Path) -> None:
    """It takes and gives lines, compressed bytes and whole files, by what Python has for files."""
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 20_000)
    with open_namespace(namespace_uri) as namespace:
        log = namespace.open_log("streams/lines", create_if_missing=True)
        with (
            log.open_stream_writer() as raw,
            io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", newline="\n") as text,
        ):
            text.writelines(f"line {number} ä\n" for number in range(1000))
        with (
            log.open_stream_reader() as raw_reader,
            io.TextIOWrapper(io.BufferedReader(raw_reader), encoding="utf-8") as lines,
        ):
            assert [line.rstrip() for line in lines] == [f"line {n} ä" for n in range(1000)]
        copied = namespace.open_log("streams/copied", create_if_missing=True)
        with copied.open_stream_writer() as out, source.open("rb") as file:
            shutil.copyfileobj(file, out, 300_000)
            assert (out.tell(), out.position) == (5_120_000, 0)
            out.flush()
            assert out.position == 5_120_000
        target = tmp_path / "target"
        with copied.open_stream_reader() as found, target.open("wb") as file:
            shutil.copyfileobj(found, file)
            assert found.seek(-3, io.SEEK_END) == found.tell() == 5_119_997
            assert found.readall() == b"\xfd\xfe\xff"
            assert found.seek(513) == 513
            assert found.read(2) == b"\x01\x02"
        assert target.read_bytes() == source.read_bytes()
        packed = namespace.open_log("streams/gzip", create_if_missing=True)
        with packed.open_stream_writer() as out, gzip.open(out, "wb") as zipped:
            zipped.write(b"packed" * 1000)
        with packed.open_stream_reader() as found, gzip.open(io.BufferedReader(found)) as zipped:
            assert zipped.read() == b"packed" * 1000


def test_the_life_of_a_stream(namespace_uri: str) -> None:
    """Flushed bytes stay, others may go; the log is sealed; a closed stream says so."""
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log("streams/life")
        log = namespace.open_log("streams/life")
        out = log.open_stream_writer()
        assert out.writable()
        assert not out.readable()
        out.write(b"kept")
        out.flush()
        out.write(b"gone")
        out.abort()
        assert out.closed
        for use in (out.flush, out.mark_end_of_stream, lambda: out.write(b"x")):
            with pytest.raises(ValueError, match="closed file"):
                use()
        found = log.open_stream_reader(2)
        assert found.readable()
        assert found.seekable()
        assert found.readall() == b"pt"
        assert not found.skip_to(5)
        with log.open_stream_writer() as out:
            assert out.tell() == 4
            out.write(b" and more")
            out.mark_end_of_stream()
            assert out.position == 13
        assert found.read(100) == b" and more"
        assert found.read(100) == b""
        assert found.has_ended
        with pytest.raises(EndOfStreamError):
            found.skip_to(14)
        found.close()
        found.close()
        for read in (found.readall, lambda: found.seek(0), lambda: found.skip_to(0)):
            with pytest.raises(ValueError, match="closed file"):
                read()
        namespace.create_log("streams/left")
        left = namespace.open_log("streams/left").open_stream_writer()
        left.write(b"written when its namespace closes")
        reading = namespace.open_log("streams/left").open_stream_reader()
    with pytest.raises(AlreadyClosedError):
        reading.readall()
    with (
        open_namespace(namespace_uri) as namespace,
        namespace.open_log("streams/left").open_stream_reader() as found,
    ):
        assert found.readall() == b"written when its namespace closes"
