"""Parts of tables that a process keeps are bounded by the files that they name."""

from __future__ import annotations

from dlcore.log.cold.files_kept import FilesKept


def test_those_that_were_not_used_for_longest_go() -> None:
    """A value that is put again, or has no files, counts as it should."""
    kept = FilesKept[str](files_max=10)
    assert kept.get("a") is None
    kept.put("a", "A", files=4)
    kept.put("b", "B", files=4)
    kept.put("empty", "E", files=0)
    assert kept.get("a") == "A"
    kept.put("c", "C", files=4)
    assert kept.get("b") is None
    assert kept.get("empty") == "E"
    assert (kept.get("a"), kept.get("c")) == ("A", "C")
    for _ in range(3):
        kept.put("c", "C2", files=6)
    assert (kept.get("a"), kept.get("c")) == ("A", "C2")
    kept.put("d", "D", files=11)
    assert [kept.get(each) for each in "acd"] == [None, None, None]


def test_one_that_is_forgotten_counts_no_more() -> None:
    """A file that is not kept may be forgotten, too."""
    kept = FilesKept[str](files_max=10)
    kept.put("a", "A", files=6)
    for url in ("a", "a", "b"):
        kept.forget(url)
    assert kept.get("a") is None
    kept.put("b", "B", files=10)
    assert kept.get("b") == "B"
