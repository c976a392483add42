"""The Arrow message of records that were written one by one, encoded and decoded without Arrow.

A busy writer's entries hold a few records each.  For these, Arrow's conversions cost more than all
other work before the entry is sent, and most of the time until a waiting reader has it.  The reason
is not the computation: Arrow's code is never in the processor's caches by then.
Such messages differ in their body, and in the numbers of their metadata that follow from the count
of records and their total length.  The places of these numbers are learned from messages that Arrow
made, and the results are compared with Arrow's.  If they are not the same bytes, Arrow makes each
message itself.
"""

from __future__ import annotations

import struct
from array import array
from functools import cache
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.records import LogRecordWithDLSN
from dlcore.log.entries.batches import batch_of, ends_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.base.records import EntryPlace
    from dlcore.wire.frames import BytesLike

PARSED_RECORDS_MAX = 100
"""Arrow decodes more records than this at least as fast."""
_ALIGNED_BYTES = 8
_TXID_BYTES = 8
_END_BYTES = 4
_WORD = struct.Struct("<q")
_COMPARED = ((1, 0), (1, 1), (1, 7), (1, 70_000), (2, 9), (3, 777), (100, 1024), (1001, 5))
"""Counts and sizes of sample records, chosen so that no two numbers are equal in all of them."""


class _Layout(NamedTuple):
    """The numbers that follow from the count of records and their total length."""

    body_bytes: int
    record_count: int
    ends_at: int
    ends_bytes: int
    payload_at: int
    payload_bytes: int

    @classmethod
    def of(cls, count: int, payload_bytes: int) -> _Layout:
        ends_at, ends_bytes = _TXID_BYTES * count, _END_BYTES * (count + 1)
        payload_at = ends_at + _padded(ends_bytes)
        body_bytes = payload_at + _padded(payload_bytes)
        return cls(body_bytes, count, ends_at, ends_bytes, payload_at, payload_bytes)


_PAYLOAD_BYTES = _Layout._fields.index("payload_bytes")


class PlainRecords(NamedTuple):
    """The records of a message."""

    txids: Sequence[int]
    ends: Sequence[int]
    """The start of each payload in `payloads`, and the end of the last."""
    payloads: memoryview

    def records(self, place: EntryPlace, first_slot: int) -> list[LogRecordWithDLSN]:
        """Return the records from `first_slot` on."""
        payloads = bytes(self.payloads)  # slices of bytes are cheap
        found = [payloads[start:end] for start, end in pairwise(self.ends[first_slot:])]
        slots = range(first_slot, len(self.txids))
        return list(map(LogRecordWithDLSN, self.txids[first_slot:], found, slots, repeat(place)))


class PlainFormat:
    """The common part of all messages of plain records; made by `learn`."""

    def __init__(self, words: Sequence[int], places: Sequence[tuple[int, int]]) -> None:
        self._words = words
        self._places = places  # indices of words in the metadata, and of numbers in a layout
        self._head = struct.Struct(f"<{len(words)}q")
        self._size_at = next(
            (_WORD.size * at for at, number in places if number == _PAYLOAD_BYTES), 0
        )

    @classmethod
    def learn(
        cls, serialize: Callable[[Sequence[int], Sequence[bytes]], bytes]
    ) -> PlainFormat | None:
        """Return the format of the messages of `serialize`; None if it is not of this kind."""
        layouts = [_Layout.of(count, count * size) for count, size in _COMPARED]
        records = [(range(count), [b"\xff" * size] * count) for count, size in _COMPARED]
        messages = [serialize(*each) for each in records]
        metadata = [
            message[: len(message) - layout.body_bytes]
            for message, layout in zip(messages, layouts, strict=True)
        ]
        whole_bytes = len(metadata[0]) // _WORD.size * _WORD.size
        words = [[each for (each,) in _WORD.iter_unpack(every[:whole_bytes])] for every in metadata]
        if len(set(map(len, words))) > 1:
            return None
        numbers = [list(each) for each in zip(*layouts, strict=True)]
        places = [
            (at, numbers.index(list(column)))
            for at, column in enumerate(zip(*words, strict=True))
            if list(column) in numbers
        ]
        found = cls(words[0], places)
        is_same = all(
            b"".join(found.message(*each)) == message
            for each, message in zip(records, messages, strict=True)
        )
        return found if is_same else None

    def message(self, txids: Sequence[int], payloads: Sequence[bytes]) -> list[BytesLike]:
        """Return the parts of the records' message; a lone payload is not copied."""
        payload = payloads[0] if len(payloads) == 1 else b"".join(payloads)
        layout = _Layout.of(len(txids), len(payload))
        ends = ends_of(payloads)
        between = bytes(layout.payload_at - layout.ends_at - layout.ends_bytes)
        head = b"".join((self._metadata(layout), array("q", txids), ends, between))
        return [head, payload, bytes(-len(payload) % _ALIGNED_BYTES)]

    def parse(self, message: memoryview, count: int) -> PlainRecords | None:
        """Return the `count` records of a message; None if it has another format."""
        size = self._head.size
        if len(message) < size:
            return None
        (payload_bytes,) = _WORD.unpack_from(message, self._size_at)
        if not 0 <= payload_bytes <= len(message):
            return None
        layout = _Layout.of(count, payload_bytes)
        if len(message) != size + layout.body_bytes or message[:size] != self._metadata(layout):
            return None
        txids = struct.unpack_from(f"<{count}q", message, size)
        ends = struct.unpack_from(f"<{count + 1}i", message, size + layout.ends_at)
        if ends[0] != 0 or ends[-1] != payload_bytes or list(ends) != sorted(ends):
            return None
        payload_at = size + layout.payload_at
        return PlainRecords(txids, ends, message[payload_at : payload_at + payload_bytes])

    def _metadata(self, layout: _Layout) -> bytes:
        words = list(self._words)
        for at, number in self._places:
            words[at] = layout[number]
        return self._head.pack(*words)


def _padded(size: int) -> int:
    return size + -size % _ALIGNED_BYTES


def _serialize(txids: Sequence[int], payloads: Sequence[bytes]) -> bytes:
    return batch_of(txids, payloads).serialize().to_pybytes()  # type: ignore[no-any-return]


@cache
def plain_format() -> PlainFormat | None:
    """Return the format of this Arrow's messages; None if it has another one."""
    return PlainFormat.learn(_serialize)
