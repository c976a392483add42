"""The segment that is written: what its entries' headers and its extent say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from dlcore.ids import DLSN
from dlcore.log.entries.batches import batch_of
from dlcore.log.entries.body import decode_entry_batch, decode_entry_header, ipc_options
from dlcore.log.writing.active import ActiveSegment, encode_group
from dlcore.log.writing.transmit import Group, Slice, Transmitter

if TYPE_CHECKING:
    from dlcore.ledger.digest import BytesLike
    from dlcore.ledger.writer import LedgerWriter


class Ledger:
    """Takes entries and answers when it is told to."""

    ledger_id = 9

    def __init__(self) -> None:
        self.entries: list[tuple[bytes, asyncio.Future[int]]] = []

    def append(self, body: list[BytesLike]) -> asyncio.Future[int]:
        """Take one."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.entries.append((b"".join(body), future))
        return future


def group_of(*txids: int) -> Group[str]:
    """Return records that are sent together."""
    transmitter: Transmitter[str] = Transmitter(entry_bytes=10_000)
    for txid in txids:
        transmitter.add_record(txid, b"payload")
    return transmitter.next_group()


def test_headers_count_what_was_pushed_and_the_extent_what_was_acknowledged() -> None:
    """Write times never go back, also when the clock does."""

    async def run() -> None:
        ledger, answers = Ledger(), list[tuple[int, int]]()
        active = ActiveSegment(4, cast("LedgerWriter", ledger), started_ms=0, timestamp_ms=1_000)
        groups = [group_of(5, 5, 6), group_of(6), group_of(9, 9)]
        for group, now_ms in zip(groups, (900, 1_200, 1_100), strict=True):
            active.push(
                group,
                now_ms=now_ms,
                options=ipc_options("none"),
                on_answer=lambda done, at_ms: answers.append((done.result(), at_ms)),
            )
        headers = [decode_entry_header(body) for body, _ in ledger.entries]
        assert [header.records_before for header in headers] == [0, 3, 4]
        assert [header.write_time_ms for header in headers] == [1_000, 1_200, 1_200]
        assert active.entries_pushed == 3
        assert active.bytes_pushed == sum(len(body) for body, _ in ledger.entries)
        assert active.entries_acknowledged == 0
        for entry_id in range(2):
            ledger.entries[entry_id][1].set_result(entry_id)
        await asyncio.sleep(0)  # callbacks run in the loop's next turn
        assert answers == [(0, 1_000), (1, 1_200)]
        positions = [
            active.acknowledged(group, timestamp_ms=at_ms)
            for group, (_, at_ms) in zip(groups, answers, strict=False)
        ]
        assert positions == [DLSN(4, 0, 0), DLSN(4, 1, 0)]
        extent = active.extent(last_entry_id=1, size_bytes=77)
        assert extent is not None
        assert (extent.ledger_id, extent.first_entry_id, extent.last_entry_id) == (9, 0, 1)
        assert (extent.record_count, extent.size_bytes) == (4, 77)
        assert (extent.first_txid, extent.last_txid) == (5, 6)
        assert extent.last_timestamp_ms == 1_200

    asyncio.run(run())


def test_a_ledger_closed_before_its_first_entry_makes_no_extent() -> None:
    """The segment is forgotten then."""
    active = ActiveSegment(4, cast("LedgerWriter", Ledger()), started_ms=0, timestamp_ms=0)
    assert active.extent(last_entry_id=-1, size_bytes=0) is None


def test_a_lone_record_is_encoded_as_arrow_does_it() -> None:
    """With compression and within a batch it goes through Arrow, and reads the same."""
    by_itself = group_of(5)
    in_batch: Transmitter[str] = Transmitter(entry_bytes=10_000)
    in_batch.add_slices([Slice(batch_of([5], [b"payload"]), 5, 5, 19)])
    bodies = []
    for group, compression in (
        (by_itself, "none"),
        (in_batch.next_group(), "none"),
        (by_itself, "zstd"),
    ):
        parts, size = encode_group(
            group, records_before=3, write_time_ms=9, options=ipc_options(compression)
        )
        body = b"".join(parts)
        assert len(body) == size
        header = decode_entry_header(body)
        assert (header.records_before, header.first_txid, header.last_txid) == (3, 5, 5)
        assert decode_entry_batch(body, header) == batch_of([5], [b"payload"])
        bodies.append(body)
    assert bodies[0] == bodies[1] != bodies[2]
