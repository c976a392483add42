"""Manifests that a process keeps are bounded by the files that they name."""

from __future__ import annotations

from dlcore.log.cold.manifests_read import ManifestsRead
from dlcore.log.cold.table_format import TableFile


def files(count: int) -> tuple[TableFile, ...]:
    """Return some files."""
    return tuple(TableFile(f"{number}/1-t-0-1.parquet", 1, (1, 1), 1) for number in range(count))


def test_those_that_were_not_used_for_longest_go() -> None:
    """A manifest that is put again, or has no files, counts as it should."""
    kept = ManifestsRead(files_max=10)
    assert kept.get("a") is None
    kept.put("a", files(4))
    kept.put("b", files(4))
    kept.put("empty", ())
    assert kept.get("a") == files(4)
    kept.put("c", files(4))
    assert kept.get("b") is None
    assert kept.get("empty") == ()
    assert (kept.get("a"), kept.get("c")) == (files(4), files(4))
    for _ in range(3):
        kept.put("c", files(6))
    assert kept.get("a") == files(4)
    kept.put("d", files(11))
    assert [kept.get(each) for each in "acd"] == [None, None, None]
