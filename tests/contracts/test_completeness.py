"""The contract suite calls each public method of the classes that all back ends share.

Goal: a new method of one back end is compared with the others from its first day.  Method: the
methods of both faces are listed, and each must be called by a name that says its class: `log.read`
of a log, `staging.stage` of a staging writer.  `tests/fixtures/ways.py` runs each such call over
every back end and both faces.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from dlcore import sync
from dlcore.api.log import DistributedLogManager
from dlcore.api.namespace import Namespace
from dlcore.log.reading.rows_reader import AsyncLogReader
from dlcore.log.staging.faces import StagedAppend, StagingWriter
from dlcore.log.writing.records_writer import AsyncLogWriter

PARTS = ("logs", "namespaces", "readers", "refusals", "renames", "staged", "streams", "writers")
SUITE = [Path(__file__).parent / f"test_{part}.py" for part in PARTS]
CLASSES: dict[str, tuple[type[Any], type[Any]]] = {
    "namespace": (Namespace, sync.Namespace),
    "log": (DistributedLogManager, sync.DistributedLogManager),
    "writer": (AsyncLogWriter, sync.LogWriter),
    "reader": (AsyncLogReader, sync.LogReader),
    "staging": (StagingWriter, sync.StagingWriter),
    "append": (StagedAppend, sync.StagedAppend),
}
"""The classes of both faces, by the name that the suite gives to their objects."""
NOT_FOR_USERS = {
    "aclose",  # the suite calls it `close`, as the blocking face does
    "fitted",  # the three are between a blocking writer and its async twin
    "write_fitted",
    "finish",
}


def called() -> set[tuple[str, str]]:
    """Return the object and the attribute of each use in the suite."""
    return {
        (node.value.id, node.attr)
        for path in SUITE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


@pytest.mark.parametrize("name", CLASSES)
def test_each_public_method_is_called(name: str) -> None:
    """Also those of one face only."""
    declared = {
        each for kind in CLASSES[name] for each in dir(kind) if not each.startswith("_")
    } - NOT_FOR_USERS
    assert declared - {method for owner, method in called() if owner == name} == set()
