"""Commits to Delta tables as bytes: what is read on, and what is left to the library."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlcore.base.errors import TableError
from dlcore.log.cold.delta_log import (
    DeltaState,
    after,
    commit_of,
    identity_of,
    name_of,
    require_known_features,
)
from dlcore.log.cold.table_format import AddedFile, TableFile, TableFiles

A = TableFile("1/7-t-0-1.parquet", 10, (1, 2), 2)
B = TableFile("2/8-t-0-1.parquet", 20, (2, 2), 2)
STATE = DeltaState(
    version=7,
    commit=b"c",
    checkpoint=3,
    position=(1, 2),
    description="of dlog",
    fields=({"name": "x"},),
    files=TableFiles.of([A]),
)


def added(file: TableFile) -> AddedFile:
    """Return a file as a commit adds it."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"_entry": [0, 1]}), sink)
    footer = pq.read_metadata(io.BytesIO(sink.getvalue()))
    return AddedFile(file.name, file.size_bytes, 5, footer, 2)


def commit(**options: Any) -> bytes:
    """Return a commit that puts `B` in the place of `A`."""
    return commit_of(
        [added(B)], [A], (2, 2), **{"app_id": "c/l", "now_ms": 9, "data_change": True, **options}
    )


def test_a_commit_is_read_as_it_was_made() -> None:
    """Its files, its position, and what it does not change."""
    data = commit()
    found = after(STATE, data, "c/l")
    assert found == STATE._replace(
        version=8, commit=identity_of(data), position=(2, 2), files=TableFiles.of([B])
    )
    assert found.seen()[:4] == (8, 8, (2, 2), "of dlog")
    assert found.seen().checkpoint == 3
    assert name_of(8) == "00000000000000000008.json"
    other = after(STATE, commit(app_id="c/other"), "c/l")
    assert other is not None
    assert other.position == (1, 2)


def test_a_commit_as_readers_need_it() -> None:
    """An action in each line, of which each knows whether rows come or go."""
    actions = [json.loads(each) for each in commit(data_change=False).splitlines()]
    assert [[*each] for each in actions] == [["commitInfo"], ["txn"], ["add"], ["remove"]]
    info, transaction, add, remove = (next(iter(each.values())) for each in actions)
    assert (info["timestamp"], info["dlog.end"]) == (9, "2:2:0")
    assert transaction == {"appId": "c/l", "version": 2 * 2**32 + 2}
    assert json.loads(add.pop("stats"))["maxValues"] == {"_entry": 1}
    assert add == {
        "path": B.name,
        "partitionValues": {},
        "size": 20,
        "modificationTime": 5,
        "dataChange": False,
    }
    assert remove == {
        "path": A.name,
        "deletionTimestamp": 9,
        "dataChange": False,
        "extendedFileMetadata": True,
        "partitionValues": {},
        "size": 10,
    }


ADD = {"path": B.name, "size": 20, "stats": json.dumps({"numRecords": 2})}


@pytest.mark.parametrize(
    "line",
    [
        {"metaData": {}},
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {"domainMetadata": {}},
        {"add": {**ADD, "deletionVector": {"storageType": "u"}}},
        {"add": {**ADD, "stats": "{"}},
        {"add": {"path": B.name}},
        {"add": {**ADD, "stats": json.dumps([])}},
        {"txn": {}},
        {"commitInfo": {}, "txn": {}},
        [],
        "text",
    ],
)
def test_tables_that_the_library_reads(line: Any) -> None:
    """Anything that dlog does not write, or that is damaged."""
    assert after(STATE, commit() + json.dumps(line).encode(), "c/l") is None


def test_a_commit_that_is_no_json_or_contradicts_itself() -> None:
    """The library tells what is wrong."""
    assert after(STATE, b"{", "c/l") is None
    both = commit() + json.dumps({"remove": {"path": B.name}}).encode()
    assert after(STATE, both, "c/l") is None


@pytest.mark.parametrize("change", [{"path": "part-1.parquet"}, {"stats": None}])
def test_a_file_that_dlog_did_not_add(change: dict[str, Any]) -> None:
    """It is refused, as the library's reading refuses it."""
    line = json.dumps({"add": {**ADD, **change}}).encode()
    with pytest.raises(TableError, match="which dlog did not add"):
        after(STATE, line, "c/l")


def test_tables_that_ask_for_more_than_dlog_does() -> None:
    """Versions and features that it knows are those of its own tables."""
    for version, features in ((2, None), (7, []), (7, ["timestampNtz", "appendOnly"])):
        require_known_features(version, features)
    with pytest.raises(TableError, match=r"asks of its writers version 4,.*_delta_log"):
        require_known_features(4, None)
    with pytest.raises(TableError, match="asks of its writers columnMapping, rowTracking,"):
        require_known_features(7, ["rowTracking", "columnMapping", "timestampNtz"])
