"""The part of a log that a filter can keep: no row of it is left out, and little else is read."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dlcore.base.ids import DLSN
from dlcore.base.records import RecordPlace
from dlcore.log.entries.batches import read_schema, typed_read_fields
from dlcore.ops.sql.narrowing import ROWS_LEFT, columns_in, narrowed
from tests.fixtures.lengths import for_each

if TYPE_CHECKING:
    from collections.abc import Callable

TYPED = pa.schema([("fare", pa.int64()), *typed_read_fields()])
FIRST, END = 5_000, 1_000_000
PER_SEGMENT = 100_000


def place_at(number: int) -> RecordPlace:
    """Return a place of a log with ten records each millisecond."""
    return RecordPlace(
        DLSN(1 + number // PER_SEGMENT, number % PER_SEGMENT, 0), number, number // 10
    )


def part_of(where: pc.Expression, schema: pa.Schema = TYPED) -> tuple[int, int]:
    """Return the numbers of the first record of the part, and of the one behind it."""
    start, end = narrowed(where, schema, place_at, place_at(FIRST), place_at(END))
    return start.sequence_id, end.sequence_id


def at(epoch_ms: int) -> pa.Scalar:
    """Return a time as DuckDB passes it."""
    return pa.scalar(datetime.fromtimestamp(epoch_ms / 1000, UTC), pa.timestamp("us", "UTC"))


@pytest.mark.parametrize(
    ("where", "first", "end"),
    [
        (pc.field("_sequence_id") >= 700_000, 700_000, END),
        (pc.field("_sequence_id") < 700_000, FIRST, 700_000),
        (
            (pc.field("_sequence_id") >= 400_000) & (pc.field("_sequence_id") <= 400_009),
            400_000,
            400_010,
        ),
        (pc.field("_sequence_id").isin([300_000, 500_000]), 300_000, 500_001),
        (pc.field("_timestamp") >= at(50_000), 500_000, END),
        ((pc.field("_timestamp") < at(50_000)) & (pc.field("fare") > 3), FIRST, 500_010),
        (pc.field("_dlsn", "lssn") == 4, 300_000, 400_000),
        ((pc.field("_sequence_id") == 800_000) | (pc.field("fare") > 3), FIRST, END),
        (pc.field("fare") > 3, FIRST, END),
    ],
)
def test_the_part_has_all_rows(where: pc.Expression, first: int, end: int) -> None:
    """And begins and ends some rows before and behind them."""
    start, stop = part_of(where)
    assert first - ROWS_LEFT <= start <= max(first, FIRST)
    assert min(end, END) <= stop <= end + ROWS_LEFT


def test_nothing_is_left() -> None:
    """The part for a filter that holds for none, and for a short log."""
    start, end = part_of(pc.field("_timestamp") > at(10**12))
    assert end - start <= ROWS_LEFT
    few = place_at(FIRST + 10)
    where = pc.field("_sequence_id") > 10**9
    assert narrowed(where, TYPED, place_at, place_at(FIRST), few) == (place_at(FIRST), few)


def test_a_log_of_bytes() -> None:
    """Its columns have other names."""
    start, end = part_of(pc.field("sequence_id") == 600_000, read_schema())
    assert 600_000 - ROWS_LEFT <= start <= 600_000 < end <= 600_001 + ROWS_LEFT


@for_each(range(20))
def test_any_ranges(seed: int) -> None:
    """Each row that a filter over numbers keeps is in the part."""
    rng = random.Random(seed)

    def numbers() -> int:
        return rng.randrange(FIRST, END)

    def term() -> tuple[pc.Expression, Callable[[int], bool]]:
        low, high = sorted((numbers(), numbers()))
        field = pc.field("_sequence_id")
        return (field >= low) & (field < high), lambda n: low <= n < high

    (one, keeps_one), (two, keeps_two) = term(), term()
    both = rng.random() < 0.5
    where = one & two if both else one | two
    start, end = part_of(where)
    for n in range(FIRST, END, 997):
        kept = (keeps_one(n) and keeps_two(n)) if both else (keeps_one(n) or keeps_two(n))
        assert not kept or start <= n < end


def test_columns_of_a_filter() -> None:
    """Nested ones by the name of their column."""
    where = (pc.field("fare") > 3) & (pc.field("_dlsn", "lssn") == 4)
    assert columns_in(where, TYPED) == ["fare", "_dlsn"]
    assert columns_in(pc.scalar(True), TYPED) == []
