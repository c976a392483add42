"""The form of tables of logs, whatever their format: a position, and files that dlog named.

The table is in the folder of the log's objects, which are its files; nothing is copied.  Its
position is the end of what it has, as a place in the log: the first entry that is not in it.  A
table keeps it as an integer that every commit sets, beside the id of the log.  Nothing here does
I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dlcore.base.errors import TableError
from dlcore.base.ids import DLSN

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import pyarrow as pa

Place: TypeAlias = tuple[int, int]
"""A segment, and an entry of it."""
Field: TypeAlias = dict[str, Any]
"""A field of a table's schema, as the JSON of its format has it."""

CHECKPOINT_EVERY = 20
"""Commits after which a table is tidied, so that the next one costs the same."""
FILES_PER_PART = 1_000
# The product is 2**63: as one number, a position fits a signed integer of 64 bits.
_ENTRIES_MAX = 2**32
_SEGMENTS_MAX = 2**31
_FILE = re.compile(r"(?P<lssn>\d{1,19})/\d{1,19}-[^/%]+-\d+-\d+\.parquet")


class TableFile(NamedTuple):
    """A file of a table: an object with entries of the segment up to `end`, which is not in it."""

    name: str
    size_bytes: int
    end: Place
    records: int


class FilesPart(NamedTuple):
    """Some files, one at least, with the least and the greatest of the places where they end."""

    files: tuple[TableFile, ...]
    first: Place
    last: Place

    @classmethod
    def of(cls, files: Iterable[TableFile]) -> FilesPart:
        """Return a part of these files."""
        found = tuple(files)
        ends = [each.end for each in found]
        return cls(found, min(ends), max(ends))

    def may_have(self, segments: Collection[int]) -> bool:
        """Return whether files of one of these segments may be among its files."""
        return any(self.first[0] <= each <= self.last[0] for each in segments)


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The files of a table at one version, in parts that know where their files end.

    A search for files that end within some range passes other parts over.  Therefore a commit costs
    the same in a table of many files as in one of few.
    """

    parts: tuple[FilesPart, ...] = ()

    @classmethod
    def of(cls, files: Iterable[TableFile]) -> TableFiles:
        """Return these files."""
        found = sorted(files, key=lambda each: each.end)
        starts = range(0, len(found), FILES_PER_PART)
        return cls(tuple(FilesPart.of(found[each : each + FILES_PER_PART]) for each in starts))

    def __len__(self) -> int:
        return sum(len(each.files) for each in self.parts)

    def __iter__(self) -> Iterator[TableFile]:
        for part in self.parts:
            yield from part.files

    def ended_by(self, place: Place, *, after: Place = (0, 0)) -> Iterator[TableFile]:
        """Yield the files that end at a place or before, and after another one."""
        for part in self.parts:
            if part.first <= place and part.last > after:
                yield from (each for each in part.files if after < each.end <= place)

    def beyond(self, place: Place) -> TableFile | None:
        """Return a file that ends after a place; None if none does."""
        for part in self.parts:
            if part.last > place:
                return next(each for each in part.files if each.end > place)
        return None

    def changed(self, adds: Iterable[TableFile], gone: Collection[str]) -> TableFiles:
        """Return the files with others, and without those of these names."""
        segments = {found for each in gone if (found := segment_of(each)) is not None}
        parts = list[FilesPart]()
        for part in self.parts:
            if not part.may_have(segments):
                parts.append(part)
            elif left := [each for each in part.files if each.name not in gone]:
                parts.append(FilesPart.of(left))
        new = list(adds)
        if new and parts and len(parts[-1].files) + len(new) <= FILES_PER_PART:
            new = [*parts.pop().files, *new]
        return TableFiles((*parts, *TableFiles.of(new).parts))


class AddedFile(NamedTuple):
    """A file that a commit adds: `footer` is Parquet's, `end_entry` the one after the last."""

    name: str
    size_bytes: int
    modified_ms: int
    footer: Any
    end_entry: int


class TableSeen(NamedTuple):
    """A table at one version: the position is None if no commit set any for this log.

    `version` grows with each commit; `known_as` is the number by which readers ask for it.
    `checkpoint` is the version that has a list of all files; None: the format has none.
    """

    version: int
    known_as: int
    position: Place | None
    description: str
    fields: tuple[Field, ...]
    files: TableFiles
    checkpoint: int | None = None


class TableForm(NamedTuple):
    """A format of tables: what is decided by it alone.

    `folder` has what belongs to the table, in the folder of the log.  `remake` and `away` say how
    to have the table made again, and how to free the place.
    """

    kind: str
    folder: str
    remake: str
    away: str
    fields_of: Callable[[pa.Schema], tuple[Field, ...]]
    missing_fields: Callable[[Sequence[Field], Sequence[Field]], list[Field]]


def app_id_of(cluster_id: str, log_id: str) -> str:
    """Return the id of a log in its table."""
    return f"{cluster_id}/{log_id}"


def description_of(app_id: str) -> str:
    """Return the description of a table, by which people see whose it is."""
    return f"the cold records of log {app_id} of dlog, which alone changes this table"


def number_of(place: Place) -> int:
    """Return a position as the integer that Delta keeps: greater for a later place.

    Raises:
        TableError: the log has too many segments, or entries in one.
    """
    lssn, entry = place
    if not (0 <= lssn < _SEGMENTS_MAX and 0 <= entry < _ENTRIES_MAX):
        raise TableError(
            f"segment {lssn}, entry {entry}: a table holds segments below {_SEGMENTS_MAX} with "
            f"fewer than {_ENTRIES_MAX} entries"
        )
    return lssn * _ENTRIES_MAX + entry


def place_of(number: int) -> Place:
    """Invert `number_of`."""
    return divmod(number, _ENTRIES_MAX)


def boundary_of(place: Place) -> DLSN:
    """Return the DLSN with which the rows after a table begin."""
    return DLSN(*place, 0)


def segment_of(name: str) -> int | None:
    """Return the segment of a file that dlog named; None for another program's."""
    found = _FILE.fullmatch(name)
    return None if found is None else int(found["lssn"])


def require_reached(url: str, position: Place | None, place: Place) -> None:
    """Require that a table has all records before a place.

    Raises:
        TableError: it does not.
    """
    if position is None or position < place:
        has = "no records" if position is None else f"records up to {boundary_of(position)}"
        raise TableError(
            f"the table in {url} has {has}, and none of its versions has all before "
            f"{boundary_of(place)}"
        )


def file_of(
    name: str, size_bytes: int, last_entry: int | None, records: int | None, form: TableForm
) -> TableFile:
    """Return a file of a table.

    Raises:
        TableError: it is not one that dlog made.
    """
    lssn = segment_of(name)
    if lssn is None or last_entry is None or records is None:
        raise TableError(
            f"the table has the file {name}, which dlog did not add: another program changed it; "
            f"to do: keep what it wrote elsewhere, then {form.remake}, and the table is made again"
        )
    return TableFile(name, size_bytes, (lssn, last_entry + 1), records)
