"""A run of entries: what their headers and its extent say."""

from __future__ import annotations

import pytest

from dlcore.log.entries.body import Compressor, batch_of, decode_entry_batch, decode_entry_header
from dlcore.log.writing.transmit import Group, Run, Transmitter


def group_of(*txids: int) -> Group[str]:
    """Return records that are sent together."""
    transmitter: Transmitter[str] = Transmitter(entry_bytes=10_000)
    for txid in txids:
        transmitter.add_record(txid, b"payload", "ticket")
    return transmitter.next_group()


def test_headers_count_what_came_before_in_the_run() -> None:
    """Write times never go back, also when the clock does."""
    run = Run(first_entry_id=7, timestamp_ms=1_000)
    assert (run.last_entry_id, run.record_count, run.first_txid) == (6, 0, -1)
    bodies = [
        b"".join(run.encode(group, now_ms=now_ms, compressor=Compressor("none")))
        for group, now_ms in ((group_of(5, 5, 6), 900), (group_of(6), 1_200), (group_of(9, 9), 1))
    ]
    headers = [decode_entry_header(body) for body in bodies]
    assert [header.records_before for header in headers] == [0, 3, 4]
    assert [header.write_time_ms for header in headers] == [1_000, 1_200, 1_200]
    assert (run.entry_count, run.last_entry_id, run.record_count) == (3, 9, 6)
    assert run.size_bytes == sum(map(len, bodies))
    assert (run.first_txid, run.last_txid, run.timestamp_ms) == (5, 9, 1_200)


@pytest.mark.parametrize("txids", [[5], [5, 6, 6], list(range(300))])
def test_plain_records_are_encoded_as_arrow_does_it(txids: list[int]) -> None:
    """With compression and within a batch they go through Arrow, and read the same."""
    plain = group_of(*txids)
    batch = batch_of(txids, [b"payload"] * len(txids))
    in_batch: Transmitter[str] = Transmitter(entry_bytes=10_000)
    in_batch.add_batch(batch)
    bodies = []
    for group, compression in ((plain, "none"), (in_batch.next_group(), "none"), (plain, "zstd")):
        run = Run()
        body = b"".join(run.encode(group, now_ms=9, compressor=Compressor(compression)))
        assert len(body) == run.size_bytes
        header = decode_entry_header(body)
        assert (header.records_before, header.record_count) == (0, len(txids))
        assert header.compressed is (compression == "zstd" and len(txids) == 300)
        assert (header.first_txid, header.last_txid) == (txids[0], txids[-1])
        assert decode_entry_batch(body, header) == batch
        bodies.append(body)
    assert bodies[0] == bodies[1]
