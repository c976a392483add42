"""Records in a stream of bytes: pure, in both directions.

Delimited: each record is followed by the delimiter, a line feed by default; the bytes after the
last delimiter are a record too.  Framed: each record follows its length, four bytes, big-endian, so
a record may hold any bytes.  Whole: all of the input is one record.
"""

from __future__ import annotations

import struct
from typing import Protocol

import click

from dlcore.base.config import RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import ConfigurationError

_LENGTH = struct.Struct(">I")


class Splitter(Protocol):
    """Cuts input that comes in chunks into records."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the records that `chunk` completes."""
        ...

    def end(self) -> list[bytes]:
        """Return the rest at the end of the input.

        Raises:
            ConfigurationError: the input ends inside a record.
        """
        ...


class Delimited:
    """Records with a delimiter between them."""

    def __init__(self, delimiter: bytes) -> None:
        self._delimiter = delimiter
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the records that `chunk` completes."""
        *records, self._rest = (self._rest + chunk).split(self._delimiter)
        if len(self._rest) > RECORD_SIZE_BYTES_MAX + len(self._delimiter):
            raise ConfigurationError(
                f"no delimiter {self._delimiter!r} within {len(self._rest)} bytes of input, a "
                f"record has at most {RECORD_SIZE_BYTES_MAX}"
            )
        return records

    def end(self) -> list[bytes]:
        """Return the bytes after the last delimiter."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class Framed:
    """Records that follow their lengths."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the records that `chunk` completes."""
        data = self._rest + chunk
        at, records = 0, []
        while len(data) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(data, at)
            if size > RECORD_SIZE_BYTES_MAX:
                raise ConfigurationError(
                    f"a record of {size} bytes in the input, expected at most "
                    f"{RECORD_SIZE_BYTES_MAX}: it may not be framed"
                )
            end = at + _LENGTH.size + size
            if end > len(data):
                break
            records.append(data[at + _LENGTH.size : end])
            at = end
        self._rest = data[at:]
        return records

    def end(self) -> list[bytes]:
        """Return nothing: the last record is complete, or the input is cut."""
        if self._rest:
            raise ConfigurationError(
                f"the input ends inside a record: {len(self._rest)} bytes follow the last whole one"
            )
        return []


class Whole:
    """One record."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Keep `chunk`."""
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self._size > RECORD_SIZE_BYTES_MAX:
            raise ConfigurationError(
                f"the input is larger than a record, which has at most {RECORD_SIZE_BYTES_MAX} "
                "bytes"
            )
        return []

    def end(self) -> list[bytes]:
        """Return all of the input, if there is any."""
        return [b"".join(self._chunks)] if self._chunks else []


def framed(payload: bytes) -> bytes:
    """Return a record after its length."""
    return _LENGTH.pack(len(payload)) + payload


class Delimiter(click.ParamType):  # type: ignore[type-arg]
    r"""Text between records, with the escapes \\n \\r \\t \\0 \\xNN and \\\\."""

    name = "text"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> bytes:
        """Return the delimiter's bytes."""
        if isinstance(value, bytes):
            return value
        text = str(value)
        try:
            delimiter = text.encode().decode("unicode_escape").encode("latin-1")
        except (UnicodeDecodeError, UnicodeEncodeError):
            self.fail(f"{text!r} is no delimiter: expected text, or an escape like \\0", param, ctx)
        if not delimiter:
            self.fail("a delimiter has at least one character", param, ctx)
        return delimiter


DELIMITER = Delimiter()
