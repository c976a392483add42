"""The checker of the disk's contract: histories that it must reject, and their good twins."""

from __future__ import annotations

import pytest

from tests.fixtures.disk_changes import (
    Created,
    Event,
    NamesSynced,
    Promised,
    Removed,
    Renamed,
    Resized,
    Synced,
    SyncedRange,
    Unsynced,
    Wrote,
    decode,
    encode,
)
from tests.fixtures.disk_promises import broken_promises

LOG, OTHER, SPARE = 1, 2, 3
ENTRY = Promised("entry 1:0", b"entry")
MADE: list[Event] = [Created("", "1.log", LOG), NamesSynced("")]


def wrote(
    offset: int, after: bytes, *, inode: int = LOG, end: int = 0, before: bytes = b""
) -> Wrote:
    """Return a write."""
    return Wrote(inode, offset, len(after), end, before, after)


GOOD: dict[str, list[Event]] = {
    "written, then synced": [*MADE, wrote(0, b"entry"), Synced(LOG), ENTRY],
    "a write that syncs itself": [*MADE, wrote(0, b"entry"), SyncedRange(LOG, 0, 5), ENTRY],
    "two writes that sync themselves": [
        *MADE,
        *(wrote(0, b"ent"), SyncedRange(LOG, 0, 3)),
        *(wrote(3, b"ry", end=3), SyncedRange(LOG, 3, 5)),
        ENTRY,
    ],
    "another entry is on its way": [
        *(*MADE, wrote(0, b"entry"), Synced(LOG)),
        *(wrote(5, b"next", end=5), ENTRY),
    ],
    "the last block is written again": [
        *(*MADE, wrote(0, b"entry"), Synced(LOG)),
        *(ENTRY, wrote(0, b"entrynext", end=5, before=b"entry")),
    ],
    "space ahead is made durable by the write": [
        *(*MADE, Resized(LOG, 0, 100), wrote(0, b"entry", end=100, before=bytes(5))),
        *(SyncedRange(LOG, 0, 5), ENTRY),
    ],
    "made under another name": [
        *(Created("", "1.log.tmp", LOG), wrote(0, b"entry"), Synced(LOG)),
        *(Renamed("", "1.log.tmp", "1.log", LOG), NamesSynced(""), ENTRY),
    ],
    "a durable copy is elsewhere": [
        *(*MADE, wrote(0, b"entry"), Synced(LOG), ENTRY),
        *(Created("", "2.log", OTHER), wrote(0, b"entry", inode=OTHER), Synced(OTHER)),
        *(NamesSynced(""), Removed("", "1.log", LOG)),
    ],
    "replaced by a file that holds it, too": [
        *(*MADE, wrote(0, b"entry"), Synced(LOG), ENTRY),
        *(Created("", "tmp", OTHER), wrote(0, b"entry", inode=OTHER), Synced(OTHER)),
        *(Renamed("", "tmp", "1.log", OTHER, LOG), ENTRY, NamesSynced(""), ENTRY),
    ],
    "in new folders that were synced": [
        *(Created("", "a", 8), NamesSynced(""), Created("a", "b", 9), NamesSynced("a")),
        *(Created("a/b", "1.log", LOG), NamesSynced("a/b"), wrote(0, b"entry"), Synced(LOG), ENTRY),
    ],
}
BAD: dict[str, tuple[list[Event], str]] = {
    "no sync": ([*MADE, wrote(0, b"entry"), ENTRY], "not synced"),
    "a sync before the write": ([*MADE, Synced(LOG), wrote(0, b"entry"), ENTRY], "not synced"),
    "a sync of another file": (
        [*MADE, Created("", "2.log", OTHER), wrote(0, b"entry"), Synced(OTHER), ENTRY],
        "not synced",
    ),
    "a sync of another range": (
        [*MADE, wrote(0, b"entry"), SyncedRange(LOG, 5, 9), ENTRY],
        "bytes 0 … 4 of 1.log are not synced",
    ),
    "a write after the sync": (
        [*MADE, wrote(0, b"ent"), Synced(LOG), wrote(3, b"ry", end=3), ENTRY],
        "not synced",
    ),
    "no write": ([*MADE, Synced(LOG), ENTRY], "no file holds it"),
    "a new name that is not synced": (
        [Created("", "1.log", LOG), wrote(0, b"entry"), Synced(LOG), ENTRY],
        "no file holds it",
    ),
    "a folder synced before the rename": (
        [
            *(Created("", "1.log.tmp", LOG), wrote(0, b"entry"), Synced(LOG), NamesSynced("")),
            *(Renamed("", "1.log.tmp", "1.log", LOG), ENTRY),
        ],
        "no file holds it",
    ),
    "another folder synced": (
        [Created("", "1.log", LOG), wrote(0, b"entry"), Synced(LOG), NamesSynced("a"), ENTRY],
        "no file holds it",
    ),
    "a folder whose own name is not synced": (
        [
            *(Created("", "a", 8), Created("a", "b", 9), NamesSynced("a")),
            *(Created("a/b", "1.log", LOG), NamesSynced("a/b"), wrote(0, b"entry")),
            *(Synced(LOG), ENTRY),
        ],
        "the name a in '' is not synced",
    ),
    "a name that no process reads": (
        [Created("", "1.log.tmp", LOG), NamesSynced(""), wrote(0, b"entry"), Synced(LOG), ENTRY],
        "no file holds it",
    ),
    "the end of the file is not synced": (
        [
            *(*MADE, wrote(0, b"entry"), Synced(LOG)),
            *(Resized(LOG, 5, 3, b"ry"), Resized(LOG, 3, 5), ENTRY),
        ],
        "no file holds it",
    ),
    "cut off afterwards": (
        [*MADE, wrote(0, b"entry"), Synced(LOG), ENTRY, Resized(LOG, 5, 4, b"y")],
        "had been answered, and no file holds it",
    ),
    "overwritten afterwards": (
        [*MADE, wrote(0, b"entry"), Synced(LOG), ENTRY, wrote(4, b"?", end=5, before=b"y")],
        "had been answered",
    ),
    "deleted before the copy is durable": (
        [
            *(*MADE, wrote(0, b"entry"), Synced(LOG), ENTRY),
            *(Created("", "2.log", OTHER), NamesSynced(""), wrote(0, b"entry", inode=OTHER)),
            *(Removed("", "1.log", LOG), Synced(OTHER)),
        ],
        "had been answered",
    ),
    "made a spare before the copy is durable": (
        [
            *(*MADE, wrote(0, b"entry"), Synced(LOG), ENTRY),
            Renamed("", "1.log", "1.log.spare", LOG),
        ],
        "had been answered",
    ),
    "replaced by another file": (
        [
            *(*MADE, wrote(0, b"entry"), Synced(LOG), ENTRY, Created("", "tmp", OTHER)),
            Renamed("", "tmp", "1.log", OTHER, LOG),
        ],
        "had been answered",
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_passes(name: str) -> None:
    """A durable entry may be acknowledged."""
    assert broken_promises(GOOD[name]) == []


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_rejected(name: str) -> None:
    """Each has one complaint, which names the answer and the reason."""
    history, why = BAD[name]
    (complaint,) = broken_promises(history)
    assert "entry 1:0" in complaint
    assert why in complaint


def test_a_sync_that_failed_covers_nothing() -> None:
    """It is no event, so the history of one is that of no sync."""
    history, _ = BAD["no sync"]
    assert broken_promises([*history, Synced(LOG)]) != []


def test_released_garbage_may_go() -> None:
    """The entries of a deleted ledger."""
    history, _ = BAD["cut off afterwards"]
    assert broken_promises(history, is_released=lambda promise: promise is ENTRY) == []


def test_a_pattern_stands_for_bytes_that_are_not_known() -> None:
    """Like a record whose checksum the test does not compute."""
    promise = Promised("fence", rb"f.{2}ce", is_pattern=True)
    written: list[Event] = [*MADE, wrote(0, b"a f\n\nce")]
    assert broken_promises([*written, Synced(LOG), promise]) == []
    assert broken_promises([*written, promise]) != []


def test_events_are_read_back_up_to_where_the_file_was_cut() -> None:
    """A process that is killed leaves the last one torn."""
    events = [*MADE, wrote(0, b"entry"), Resized(LOG, 5, 3, b"ry"), ENTRY]
    data = b"".join(map(encode, events))
    assert [event for event, _ in decode(data)] == events
    assert [end for _, end in decode(data)][-1] == len(data)
    for cut in range(1, 8):
        assert [event for event, _ in decode(data[:-cut])] == events[:-1]


def test_a_write_that_syncs_itself_covers_its_own_range_alone() -> None:
    """Other writes through the page cache stay unsynced."""
    unsynced = Unsynced()
    unsynced.handle(Wrote(LOG, 0, 10, 0, b"", b"0123456789"))
    unsynced.handle(SyncedRange(LOG, 4, 6))
    assert [unsynced.touches(LOG, at, at + 1) for at in range(10)] == [
        *([True] * 4),
        *([False] * 2),
        *([True] * 4),
    ]
    unsynced.handle(Synced(LOG))
    assert unsynced.is_empty
