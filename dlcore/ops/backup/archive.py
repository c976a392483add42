"""The file of an export: lines of JSON, compressed, with a checksum; pure.

The first line is an `ExportHeader`, and each further one a node, parents before their children.
The last line counts the nodes, and has the SHA-256 of all lines before it.  Paths are relative to
the namespace's root, so that another root may be imported to.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from dlcore.base.errors import CorruptMetadataError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "dlog-metadata"
LAYOUT = 1
"""Version of the format; files of another version are refused."""


class LeftOut(msgspec.Struct, frozen=True):
    """A log that an export has not, because its metadata are damaged, and the reason."""

    log: str
    reason: str


class ExportHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The namespace that was exported, and when."""

    format: str = FORMAT
    layout: int = LAYOUT
    root: str
    cluster_id: str
    exported_ms: int
    release: str
    moment: int
    """The number of the last transaction of logs and commits that it has."""
    logs: int
    ledgers: int
    left_out: tuple[LeftOut, ...] = ()
    """Logs that are not in it."""


class _Node(msgspec.Struct, frozen=True):
    path: str
    value: bytes  # base64 in JSON


class _End(msgspec.Struct, frozen=True):
    nodes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Export:
    """An export: nodes by path, relative to the root, which is ""."""

    header: ExportHeader
    nodes: Mapping[str, bytes]


_encode = msgspec.json.Encoder().encode


def packed(export: Export) -> bytes:
    """Return the bytes of the file."""
    lines = [_encode(export.header)]
    lines += [_encode(_Node(path, value)) for path, value in sorted(export.nodes.items())]
    body = b"".join(line + b"\n" for line in lines)
    digest = hashlib.sha256(body).hexdigest()
    # Without the time of day, so that equal exports give equal bytes.
    return gzip.compress(body + _encode(_End(len(export.nodes), digest)) + b"\n", mtime=0)


def unpacked(data: bytes, *, source: str) -> Export:
    """Return the export in a file.

    Raises:
        CorruptMetadataError: it is no whole and undamaged export, or of another version.
    """
    try:
        body = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise CorruptMetadataError(f"{source} is no export of metadata, or damaged: {error}") from (
            error
        )
    *lines, last = body.removesuffix(b"\n").split(b"\n")
    try:
        header = _header_of(lines, source)
        end = msgspec.json.decode(last, type=_End)
        digest = hashlib.sha256(body[: len(body) - len(last) - 1]).hexdigest()
        if digest != end.sha256:
            raise CorruptMetadataError(
                f"{source} is damaged: its lines have the checksum {digest}, expected {end.sha256}"
            )
        decoder = msgspec.json.Decoder(_Node)
        nodes = {node.path: node.value for node in map(decoder.decode, lines[1:])}
    except msgspec.MsgspecError as error:
        raise CorruptMetadataError(f"{source} is no whole export of metadata: {error}") from error
    return Export(header, nodes)


def _header_of(lines: list[bytes], source: str) -> ExportHeader:
    header = msgspec.json.decode(lines[0] if lines else b"", type=ExportHeader)
    if (header.format, header.layout) != (FORMAT, LAYOUT):
        raise CorruptMetadataError(
            f"{source} has format {header.format} {header.layout}, this release reads {FORMAT} "
            f"{LAYOUT}"
        )
    return header
