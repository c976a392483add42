"""The demo's own truth: the table, the statistics of pandas, and a comparison that can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import pytest

from demo.flights import (
    FLIGHT_COUNT,
    FLIGHT_SCHEMA,
    STATISTICS_SCHEMA,
    differences,
    load_flights,
    statistics,
)
from demo.report import save_plot

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def flights() -> pd.DataFrame:
    """The original table."""
    return load_flights()


def fields(schema: str) -> list[str]:
    """Return the names of a schema."""
    return [field.split()[0] for field in schema.split(", ")]


def test_the_table_is_whole_and_in_order(flights: pd.DataFrame) -> None:
    """Row and field counts, and txids that a log accepts."""
    assert len(flights) == FLIGHT_COUNT
    assert sorted(flights.columns) == sorted([*fields(FLIGHT_SCHEMA), "txid"])
    assert flights["txid"].is_monotonic_increasing
    assert flights["id"].is_unique


def test_txid_is_the_scheduled_departure(flights: pd.DataFrame) -> None:
    """One flight by hand: UA 1545, scheduled 5:15 in New York on the first of January."""
    first = flights[flights["id"] == 0].iloc[0]
    assert (first["carrier"], first["flight"], first["sched_dep_time"]) == ("UA", 1545, 515)
    assert pd.Timestamp(first["txid"], unit="ms", tz="UTC") == pd.Timestamp("2013-01-01T10:15Z")


def test_statistics_against_a_loop(flights: pd.DataFrame) -> None:
    """A second implementation without pandas' grouping, on the first day."""
    day = flights.head(800)
    rows: dict[tuple[str, int], list[int | None]] = {}
    for carrier, txid, delay in zip(day["carrier"], day["txid"], day["dep_delay"], strict=True):
        hour = txid - txid % 3_600_000
        rows.setdefault((carrier, hour), []).append(None if delay is pd.NA else int(delay))
    table = statistics(day)
    assert list(table.columns) == fields(STATISTICS_SCHEMA)
    assert len(table) == len(rows)
    for row in table.itertuples():
        delays = rows[(str(row.carrier), int(str(row.hour_ms)))]
        known = [delay for delay in delays if delay is not None]
        assert row.flights == len(delays)
        assert row.departed == len(known)
        if known:
            assert row.dep_delay_min == min(known)
            assert row.dep_delay_max == max(known)
            assert row.dep_delay_mean == sum(known) / len(known)


def test_differences_sees_every_kind_of_damage(flights: pd.DataFrame) -> None:
    """The demo's verdict is worth what this is worth."""
    expected = flights.head(100)
    assert differences(expected.copy(), expected) == []
    assert "99 rows instead of 100" in differences(expected.iloc[1:], expected)[0]
    twice = pd.concat([expected.iloc[:1], expected.iloc[:1], expected.iloc[2:]])
    assert any("id" in text for text in differences(twice, expected))
    for value in (999, pd.NA):
        damaged = expected.copy()
        damaged.loc[7, "dep_delay"] = value
        assert len(differences(damaged, expected)) == 1
    swapped = expected.iloc[[1, 0, *range(2, 100)]]
    assert differences(swapped, expected)
    mean = statistics(expected)
    damaged = mean.assign(arr_delay_mean=mean["arr_delay_mean"].astype("float64") + 1e-9)
    assert "arr_delay_mean" in differences(damaged, mean)[0]


def test_the_plot_is_a_picture(flights: pd.DataFrame, tmp_path: Path) -> None:
    """It is written where it should be."""
    path = tmp_path / "folder" / "plot.png"
    save_plot(statistics(flights.head(5000)), path)
    assert path.read_bytes().startswith(b"\x89PNG")
