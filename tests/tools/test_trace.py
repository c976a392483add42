"""The tool that shows the ways of a record, and counts what the classes of the product have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tools.trace import counts
from tools.trace.__main__ import lines_of, lines_of_figure
from tools.trace.counts import Figure, count
from tools.trace.passage import Passage, trace_in_temporary_folder, usual

if TYPE_CHECKING:
    from pathlib import Path

FACES = '''
class Namespace:
    """Three definitions."""

    kinds: ClassVar[int] = 1
    one: int

    def __init__(self) -> None:
        self.two, self.three = 1, 2
        self.three += other.four

    @property
    def uri(self) -> str: ...
    async def open_log(self) -> None: ...
    def close(self) -> None: ...
    def _hidden(self) -> None: ...


class DirectNamespace(Namespace):
    def close(self) -> None: ...
    def ports(self) -> None: ...


class Parts(DirectNamespace, Generic[T]):
    def open_log(self) -> None: ...
    def part(self) -> None: ...


class OpenedLog:
    @property
    def name(self) -> str: ...


class Questions(OpenedLog):
    def first(self) -> None: ...


class DistributedLogManager(Questions):
    def read(self) -> None: ...


class Calls:
    def generated(self) -> None: ...


class LogRange(Calls):
    def schema(self) -> None: ...


class Other:
    def anything(self) -> None: ...
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A product of two packages, in which one file is generated."""
    for folder in ("dlcore", "dlcore/api", "dlcore/loose", "bookie"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dlcore/api/__init__.py").touch()
    (tmp_path / "dlcore/api/faces.py").write_text(FACES, encoding="utf-8")
    (tmp_path / "dlcore/x_pb2.py").write_text("class LogReader:\n def a(self): ...\n")
    (tmp_path / "bookie/small.py").write_text("# One\n\n", encoding="utf-8")
    return tmp_path


def test_things_that_are_counted(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines, classes above the limits, definitions that are new, and packages."""
    monkeypatch.setattr(counts, "ATTRIBUTES_MAX", 2)
    monkeypatch.setattr(counts, "METHODS_MAX", 1)
    lines, attributes, methods, face, packages = count(tree)
    assert lines.value == FACES.count("\n") + 2
    assert attributes.parts == ("3 Namespace, dlcore/api/faces.py",)
    assert [each.partition(",")[0] for each in methods.parts] == [
        "5 Namespace",
        "2 DirectNamespace",
        "2 Parts",
    ]
    # uri, open_log, close; ports; part; name; first; read; schema
    assert face.value == 9
    assert packages.value == 1


def test_a_module_counts_if_most_records_pass_it() -> None:
    """In the order of most records, and with the median of those that pass it."""
    passed = [{"b": 4, "c": 1}, {"c": 2, "timer": 1, "b": 6}, {"c": 9}]
    found = usual([Passage(name="read", client=each, bookie={}) for each in passed])
    assert found == Passage(name="read", client={"c": 2, "b": 4}, bookie={})
    assert list(found.client) == ["c", "b"]


def test_lines_that_are_printed() -> None:
    """Rooms are packages; of dlcore's modules in a bookie the calls count alone."""
    client = {"dlcore.log.writer": 3, "dlcore.wire.frames": 1, "dlcore.log.batches": 2}
    bookie = {"dlcore.wire.frames": 5, "bookie.server": 1, "bookie.files.log": 1}
    assert list(lines_of(Passage(name="write", client=client, bookie=bookie))) == [
        "write, client: 2 rooms (aim 8), 3 modules (aim 14), 6 calls",
        "    dlcore.log               writer 3, batches 2",
        "    dlcore.wire              frames 1",
        "write, bookie: 2 rooms (aim 5), 2 modules (aim 10), 7 calls",
        "    dlcore.wire              frames 5  (of dlcore: not counted)",
        "    bookie                   server 1",
        "    bookie.files             log 1",
    ]
    figure = Figure(name="lines", value=79_000, aim=60_000, parts=("2 A, a.py",))
    assert list(lines_of_figure(figure)) == ["lines: 79,000 (aim 60,000)", "    2 A, a.py"]


def test_a_record_is_seen_on_both_ways() -> None:
    """Each side sees its own calls, from the user's to the disk, and those of its way alone."""
    write, read = trace_in_temporary_folder(2)
    assert {"dlcore.log.writing.writer", "dlcore.wire.connection"} <= write.client.keys()
    assert {"bookie.serving.connection", "bookie.disks.real_file"} <= write.bookie.keys()
    assert {"dlcore.log.reading.reader", "dlcore.wire.connection"} <= read.client.keys()
    assert {"bookie.serving.connection", "bookie.storage.reads"} <= read.bookie.keys()
    assert "bookie.storage.reads" not in write.bookie
    assert not any(each.startswith("dlcore.log.writing") for each in read.client)
    assert not any(each.startswith("bookie.") for each in (*write.client, *read.client))
