"""A ticket that begins at a truncated record is refused, whatever it names the record by.

Goal: a loss is no silence, and a read from the beginning begins at the first record left.
Method: every way to name a start, on logs that are truncated in every place.
`tests/contracts/test_readers.py` asks the same of readers and ranges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.errors import AlreadyTruncatedError
from dlcore.base.ids import DLSN
from tests.dlcore.proxy.test_known_logs import got, path_of
from tests.fixtures.memory_namespace import MemoryCluster, on_log, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog

LEFT = {
    "nothing": (DLSN(1, 0, 0), range(12)),
    "in a segment": (DLSN(2, 2, 0), range(6, 12)),
    "whole segments": (DLSN(3, 0, 0), range(8, 12)),
    "all": (DLSN(3, 4, 0), range(12, 12)),
}
"""Where logs of three segments, of four entries each, are truncated, and what is left."""


def txid_of(number: int) -> int:
    """Return the transaction id of a record: not each number is one."""
    return 10 * number + 5


async def make(log: DirectLog, end: DLSN) -> None:
    """Write three segments of four entries, and truncate what is below a position."""
    for first in (0, 4, 8):
        async with await log.open_writer() as writer:
            for number in range(first, first + 4):
                await writer.write(record(txid_of(number), b"%d" % number))
    await log.truncate(end)


def starts(number: int) -> list[tuple[str, Any]]:
    """Return all names of a record, the last of which is a number between ids."""
    position = DLSN(number // 4 + 1, number % 4, 0)
    return [
        ("dlsn", position),
        ("txid", txid_of(number)),
        ("txid", txid_of(number) - 5 + (number == 0)),
        ("sequence_id", number),
    ]


@pytest.mark.parametrize("place", LEFT)
@pytest.mark.parametrize("follow", [False, True], ids=["once", "follow"])
def test_a_ticket_is_also_refused(place: str, *, follow: bool) -> None:
    """Also by the number of a record; as readers are."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        end, left = LEFT[place]
        await make(log, end)
        await log.mark_end_of_stream()
        reads = path_of(await cluster.open("proxy"))
        payloads = [b"%d" % number for number in left]
        ticket: dict[str, Any] = {"log": "clicks", "follow": follow}
        for beginning in ({"dlsn": "1:0:0"}, {"txid": 0}, {"sequence_id": 0}, {"time": EPOCH}):
            assert await got(reads, **ticket, start=beginning) == payloads
        for number in range(12):
            for kind, start in starts(number):
                named = {kind: str(start) if kind == "dlsn" else start}
                if number in left:
                    expected = [each for each in payloads if int(each) >= number]
                    assert await got(reads, **ticket, start=named) == expected
                elif start not in (0, DLSN.INITIAL):
                    with pytest.raises(AlreadyTruncatedError, match=f"{start} was truncated"):
                        await got(reads, **ticket, start=named)
        await reads.aclose()

    on_log(body)


EPOCH = "1970-01-01T00:00:00Z"
"""A time names no record: what is not older is read."""


def test_the_truncated_part_in_a_snapshot() -> None:
    """The answer shows it; readers that ignore truncation, and moves of subscriptions, ask, too."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await make(log, DLSN(3, 0, 0))
        snapshot = await log.get_snapshot()
        assert (snapshot.removed_txid, snapshot.truncated_txid) == (txid_of(7), txid_of(7))
        assert (snapshot.first, snapshot.next_sequence_id) == (DLSN(3, 0, 0), 12)
        assert await log.move_subscription("s", txid=txid_of(8)) == DLSN(3, 0, 0)
        with pytest.raises(AlreadyTruncatedError, match="transaction id 25 was truncated away"):
            await log.move_subscription("s", txid=25)
        async with await log.open_reader(txid=25, ignore_truncation=True) as reader:
            assert [each.payload async for each in reader] == [b"8", b"9", b"10", b"11"]

    on_log(body)
