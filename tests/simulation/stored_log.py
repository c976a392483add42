"""The metadata of logs as the checkers read it: by the numbers of its layout, none of the product.

A head, a completed segment and a chunk are msgpack arrays, names, settings and subscriptions are
JSON; of each only what checkers need is named here.  Extents are packed by tens of integers, the
second of which is the ledger, described by its difference from the one before.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from dlcore.base.ids import DLSN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dlcore.metadata.port import Versioned

_INTS_PER_EXTENT = 10
_OPEN = 2
_HEAD_LAST_LSSN, _HEAD_SEALED, _HEAD_DELETED, _HEAD_END = 1, 2, 3, 7
_HEAD_FIRST_ACTIVE, _HEAD_FIRST_LSSN, _HEAD_FIRST_CHUNK = 8, 9, 10
_HEAD_MERGES, _HEAD_SEGMENT, _HEAD_NAME, _HEAD_PRODUCERS = 11, 13, 14, 15
_OPEN_CHUNKS, _OPEN_CHUNKED, _OPEN_PACKED = 2, 3, 4
_END_CHUNKS, _END_CHUNKED, _END_PACKED = 4, 5, 6
_CHUNK_COVERS, _CHUNK_FIRST, _CHUNK_PACKED = 1, 2, 4


def _values(value: bytes) -> list[Any]:
    found: list[Any] = msgspec.msgpack.decode(value)
    return found


def _packed_in(path: str, value: bytes) -> list[int]:
    """Return the packed extents of a node below `heads`."""
    depth = path.count("/heads/") and path.split("/heads/")[1].count("/")
    if not value or (depth > 1 and not path.rpartition("/")[2].isdigit()):
        return []  # a lock, or the settings
    values = _values(value)
    if depth == 1:
        segment = values[_HEAD_SEGMENT]
        return list(segment[_OPEN_PACKED]) if segment else []
    return list(values[_END_PACKED if depth == 2 else _CHUNK_PACKED])


def ledgers_in(path: str, value: bytes) -> Counter[int]:
    """Return how many extents of each ledger a node below `heads` names."""
    return Counter(accumulate(_packed_in(path, value)[1::_INTS_PER_EXTENT]))


@dataclass(frozen=True, slots=True)
class StoredExtent:
    """The ledger of an extent, how much it has, and when its last record was written."""

    ledger: int
    entries: int
    records: int
    last_ms: int


def extents_in(path: str, value: bytes) -> list[StoredExtent]:
    """Return the extents that a node below `heads` names."""
    flat = _packed_in(path, value)
    ledgers = accumulate(flat[1::_INTS_PER_EXTENT])
    times = zip(flat[8::_INTS_PER_EXTENT], flat[9::_INTS_PER_EXTENT], strict=True)
    return [
        StoredExtent(ledger, more + 1, records, last_ms)
        for ledger, more, records, last_ms in zip(
            ledgers,
            flat[3::_INTS_PER_EXTENT],
            flat[4::_INTS_PER_EXTENT],
            accumulate(map(sum, times)),
            strict=True,
        )
    ]


def open_extents_in(path: str, value: bytes) -> list[bool]:
    """Return of each extent that a node below `heads` names whether it is open."""
    return [bool(flags & _OPEN) for flags in _packed_in(path, value)[::_INTS_PER_EXTENT]]


def merges_of(value: bytes) -> int:
    """Return how often a log's head says that something was merged."""
    merges: int = _values(value)[_HEAD_MERGES]
    return merges


@dataclass(frozen=True, slots=True)
class Registration:
    """How many extents refer to a ledger by its own count, and when the last ones were merged."""

    extents: int
    released_ms: int


def read_registration(value: bytes) -> Registration:
    """Read the registration of a staged or merged ledger."""
    found = json.loads(value)
    return Registration(found["extents"], found["released_ms"])


def nodes_of_log(head_path: str, nodes: Mapping[str, Versioned]) -> set[str]:
    """Return the nodes that a log must have below its head, by what its head and segments say.

    Only the own node of a missing chunk or segment is among them.
    """
    head = _values(nodes[head_path].value)
    found: set[str] = set()
    for lssn in range(head[_HEAD_FIRST_LSSN], head[_HEAD_LAST_LSSN] + 1):
        path = f"{head_path}/{lssn}"
        segment = head[_HEAD_SEGMENT]
        if lssn == head[_HEAD_LAST_LSSN] and segment:
            count = segment[_OPEN_CHUNKS]
            if count:
                found.add(path)
        else:
            found.add(path)
            count = _values(nodes[path].value)[_END_CHUNKS] if path in nodes else 0
        number = head[_HEAD_FIRST_CHUNK] if lssn == head[_HEAD_FIRST_LSSN] else 0
        while number < count:
            chunk = f"{path}/{number}"
            found.add(chunk)
            number += _values(nodes[chunk].value)[_CHUNK_COVERS] if chunk in nodes else count
    return found


def completed_segments_of(head_path: str, nodes: Mapping[str, Versioned]) -> list[str]:
    """Return the nodes of a log's completed segments."""
    head = _values(nodes[head_path].value)
    last = head[_HEAD_LAST_LSSN] - bool(head[_HEAD_SEGMENT])
    return [f"{head_path}/{lssn}" for lssn in range(head[_HEAD_FIRST_LSSN], last + 1)]


@dataclass(frozen=True, slots=True)
class Front:
    """Where the first stored extent of a log begins, and the extents of that segment.

    Those that are in the head are not among them: they stay as long as their segment.
    """

    start: DLSN
    extents: list[StoredExtent]


def front_of(head_path: str, read: Callable[[str], bytes | None]) -> Front | None:
    """Return the front of a log, by a function that returns the value of a node.

    None: a node is missing.
    """
    head = _values(read(head_path) or b"")
    lssn, last = head[_HEAD_FIRST_LSSN], head[_HEAD_LAST_LSSN]
    path, extents = f"{head_path}/{lssn}", list[StoredExtent]()
    if lssn > last:
        return Front(DLSN(lssn, 0, 0), [])
    if lssn == last and head[_HEAD_SEGMENT]:
        count, sums = head[_HEAD_SEGMENT][_OPEN_CHUNKS], head[_HEAD_SEGMENT][_OPEN_CHUNKED]
        tail = []
    elif end := read(path):
        count, sums = _values(end)[_END_CHUNKS], _values(end)[_END_CHUNKED]
        tail = extents_in(path, end)
    else:
        return None
    start, number = None, head[_HEAD_FIRST_CHUNK]
    while number < count:
        chunk = read(f"{path}/{number}")
        if chunk is None:
            return None
        start = _values(chunk)[_CHUNK_FIRST] if start is None else start
        extents += extents_in(f"{path}/{number}", chunk)
        number += _values(chunk)[_CHUNK_COVERS]
    return Front(DLSN(lssn, sums[0] if start is None else start, 0), [*extents, *tail])


@dataclass(frozen=True, slots=True)
class Head:
    """The content of a log's head."""

    sealed: bool
    deleted: bool
    end: tuple[int, int]
    first_active: DLSN
    first_lssn: int
    name: str
    producers_lssn: int

    @property
    def needed_lssn(self) -> int:
        """The first segment that may stay: one that tells of producers does, though truncated."""
        return min(self.first_active.lssn, self.producers_lssn or self.first_active.lssn)

    def loses(self, front: Front) -> StoredExtent | None:
        """Return the extent with which a log begins if it is to go, once it is old enough.

        A segment keeps its last one, and one that tells of producers keeps all.
        """
        start, first = front.start, self.first_active
        if len(front.extents) < 2 or self.producers_lssn == start.lssn:
            return None
        extent = front.extents[0]
        is_passed = DLSN(start.lssn, start.entry_id + extent.entries, 0) <= first
        return extent if is_passed else None


def read_head(value: bytes) -> Head:
    """Read the head of a log."""
    values = _values(value)
    return Head(
        sealed=values[_HEAD_SEALED],
        deleted=values[_HEAD_DELETED],
        end=tuple(values[_HEAD_END]),
        first_active=DLSN(*values[_HEAD_FIRST_ACTIVE]),
        first_lssn=values[_HEAD_FIRST_LSSN],
        name=values[_HEAD_NAME],
        producers_lssn=values[_HEAD_PRODUCERS],
    )


def read_name(value: bytes) -> tuple[str, str]:
    """Read the node of a log's name: the name, and the log's id."""
    found = json.loads(value)
    return found["name"], found["log_id"]


@dataclass(frozen=True, slots=True)
class Kept:
    """For how long a log's settings keep its records; 0: at any age."""

    retention_ms: int = 0
    is_explicit: bool = False

    @property
    def goes_by_age(self) -> bool:
        """Whether old records are removed without a call."""
        return bool(self.retention_ms) and not self.is_explicit

    @property
    def waits_for_age(self) -> bool:
        """Whether what is truncated goes once it is old."""
        return bool(self.retention_ms) and self.is_explicit


def read_kept(value: bytes) -> Kept:
    """Read the settings of a log."""
    settings = json.loads(value)["settings"]
    retention_s = settings.get("retention_s") or 0
    return Kept(int(retention_s * 1000), settings.get("explicit_truncation", False))


@dataclass(frozen=True, slots=True)
class Tier:
    """Where a log's old segments go, and how old they are then."""

    url: str
    after_ms: int


def read_tier(value: bytes) -> Tier | None:
    """Read where the settings of a log send its segments; None: nowhere."""
    settings = json.loads(value)["settings"]
    url = settings.get("tier")
    return Tier(url, int(settings.get("tier_after_s", 3600.0) * 1000)) if url else None


def has_table(value: bytes) -> bool:
    """Read whether the settings of a log ask for a table."""
    return bool(json.loads(value)["settings"].get("table"))


def redacted_ledgers_in(values: Iterable[bytes]) -> set[int]:
    """Return the ledgers that go at once, by the nodes of redactions."""
    return {each for value in values for each in json.loads(value)["ledgers"]}


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a subscription, and its present holder."""

    dlsn: DLSN
    token: str


def read_position(value: bytes) -> Position:
    """Read a subscription."""
    found = json.loads(value)
    return Position(DLSN(*found["position"]), found["token"])
