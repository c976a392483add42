"""The files of a table in parts: the same answers as those of a plain list."""

from __future__ import annotations

import random

import pytest

from dlcore.log.cold import table_format
from dlcore.log.cold.table_format import FilesPart, TableFile, TableFiles
from tests.fixtures.lengths import sample


def file(lssn: int, entry: int) -> TableFile:
    """Return a file of a segment that ends before an entry."""
    return TableFile(f"{lssn}/7-t-{entry}-1.parquet", 1, (lssn, entry), 1)


@pytest.mark.parametrize("seed", sample(range(200), 20))
def test_parts_answer_as_a_list_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files come at the end, go from anywhere, and come in the place of others."""
    monkeypatch.setattr(table_format, "FILES_PER_PART", 3)
    rng = random.Random(seed)
    plain = [file(lssn, entry) for lssn in range(1, 4) for entry in range(1, 4)]
    files = TableFiles.of(rng.sample(plain, len(plain)))
    for lssn in range(4, 30):
        adds = [file(lssn, entry) for entry in range(1, rng.randint(1, 5))]
        if rng.random() < 0.2:
            adds.append(file(rng.randint(1, lssn), 10 + lssn))
        gone = {each.name for each in plain if rng.random() < 0.1}
        files = files.changed(adds, gone)
        plain = [*(each for each in plain if each.name not in gone), *adds]
        assert sorted(files) == sorted(plain)
        assert len(files) == len(plain)
        assert all(1 <= len(part.files) <= 3 for part in files.parts)
        place = (rng.randint(0, lssn + 1), rng.randint(0, 4))
        expected = [each for each in plain if each.end <= place]
        assert sorted(files.ended_by(place)) == sorted(expected)
        after = (rng.randint(0, lssn + 1), rng.randint(0, 4))
        later = [each for each in expected if each.end > after]
        assert sorted(files.ended_by(place, after=after)) == sorted(later)
        found = files.beyond(place)
        assert (found is None) == (len(expected) == len(plain))
        assert found is None or found.end > place


def test_a_table_without_files() -> None:
    """Nothing ends anywhere."""
    files = TableFiles()
    assert list(files) == []
    assert len(files) == 0
    assert files.beyond((1, 0)) is None
    assert list(files.ended_by((9, 0))) == []
    assert files.changed([], {"x"}) == files
    assert TableFiles.of([]) == files


def test_which_part_may_have_a_segment() -> None:
    """By the ends of its files."""
    part = FilesPart.of([file(5, 1), file(3, 2)])
    assert (part.first, part.last) == ((3, 2), (5, 1))
    assert part.may_have([1, 4])
    assert not part.may_have([2, 6])
