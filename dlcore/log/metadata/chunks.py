"""Reads the chunks of a segment, many at once, by the numbers that each covers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.log.metadata.values import Chunk
from dlcore.metadata.stored import decode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dlcore.metadata.paths import LogPaths
    from dlcore.metadata.port import MetadataStore


class ChunkMissingError(Exception):
    """The segment does not have these chunks: it has changed since.

    This error never leaves the log layer.
    """


async def read_chunks(
    store: MetadataStore, paths: LogPaths, lssn: int, numbers: range, *, at_once: int = 500
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield the chunks that cover `numbers`, each with its own number.

    `at_once` chunks are read in one request; the caller may stop early.

    Raises:
        ChunkMissingError: a chunk is missing, or the last one covers further numbers.
        CorruptMetadataError: a chunk does not parse.
    """
    number = numbers.start
    while number < numbers.stop:
        asked = range(number, min(numbers.stop, number + at_once))
        nodes = await store.get_many([paths.chunk(lssn, each) for each in asked])
        while number < asked.stop:
            node, path = nodes[number - asked.start], paths.chunk(lssn, number)
            if node is None:
                raise ChunkMissingError(f"chunk {number} of segment {lssn} is missing")
            chunk = decode(Chunk, node.value, source=path)
            yield number, chunk
            number += chunk.covers
    if number > numbers.stop:
        raise ChunkMissingError(
            f"chunks of segment {lssn} cover numbers up to {number - 1}, expected "
            f"{numbers.stop - 1}"
        )
