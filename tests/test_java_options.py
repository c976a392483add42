"""Options that the tests tell Javas arrive there as they were, from a folder of any name."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import TYPE_CHECKING

import pytest

from dlcore.ops.sandbox.zookeeper import find_java
from tests.fixtures import java

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["plain", "Größe ü", """it's "a" \\ b"""])
def test_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    """Blanks, letters beyond ASCII, quotes of both kinds and backslashes."""
    folder = tmp_path / name
    output = subprocess.run(
        [find_java(), "-XshowSettings:properties", "-version"],
        env={
            **os.environ,
            "LC_ALL": "C.UTF-8",
            "JDK_JAVA_OPTIONS": java.java_options_in(folder),
        },
        capture_output=True,
        check=True,
        encoding="utf-8",
    ).stderr
    assert f"    java.io.tmpdir = {folder}" in output.splitlines()


def test_an_environment_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archives of classes are in it; Spark splits its variable as a shell does."""
    archives = {variable: tmp_path / "Größe ü" / variable for variable in java._ARCHIVES}
    for archive in archives.values():
        archive.parent.mkdir(exist_ok=True)
        archive.touch()
    monkeypatch.setattr(java, "_ARCHIVES", archives)
    for variable in archives:
        monkeypatch.setenv(variable, "")
    java.pytest_configure()
    options = {variable: f"-XX:SharedArchiveFile={path}" for variable, path in archives.items()}
    assert shlex.split(java.archive_of_spark()) == [options["SPARK_SUBMIT_OPTS"]]
    assert f'"{options["JDK_JAVA_OPTIONS"]}"' in os.environ["JDK_JAVA_OPTIONS"]
