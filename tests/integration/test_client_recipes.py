"""The recipes of docs/clients.md, run as they stand there: by Arrow's own clients, unmodified."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow.flight as flight
import pytest

from dlcore.records import LogRecord
from dlcore.sync import open_namespace
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.proxies import act, proxy_process
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

WAIT_S = 60
RECORDS = 1000
FILES = {
    "Go": {"go": "main.go"},
    "Java": {"java": "src/main/java/Recipe.java", "xml": "pom.xml"},
    "Rust": {"rust": "src/main.rs", "toml": "Cargo.toml"},
}
TOOLS = {"Go": ["go"], "Java": ["mvn", "java"], "Rust": ["cargo"]}


@pytest.fixture(scope="module")
def endpoint(sandbox: Sandbox) -> Iterator[str]:
    """One of two proxies."""
    with proxy_process(sandbox.uri) as first, proxy_process(sandbox.uri) as second:
        wanted = {first.location, second.location}
        wait_until(lambda: wanted <= set(first.act("proxies")["locations"]), timeout_s=WAIT_S)
        yield first.location


@pytest.fixture
def elsewhere(endpoint: str) -> str:
    """The name of a log that there is not yet, and that the other proxy will serve."""
    with flight.connect(endpoint) as client:
        while True:
            name = f"recipes/{uuid4().hex}"
            if act(client, "owner", log=name)["location"] != endpoint:
                return name


def section(name: str, endpoint: str, log: str) -> str:
    """Return what the docs say of a language, with an address and a log that there are."""
    text = (REPOSITORY / "docs/clients.md").read_text(encoding="utf-8")
    text = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert "```" in text
    return text.replace("grpc://127.0.0.1:4190", endpoint).replace('"orders"', json.dumps(log))


def blocks(text: str, language: str) -> list[str]:
    """Return the blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def payloads_in(uri: str, log: str) -> list[bytes]:
    """Return what a log holds, read without a proxy."""
    with open_namespace(uri) as namespace:
        table = namespace.open_log(log).read().to_arrow()
    return [bytes(each) for each in table["payload"].to_pylist()]


def test_python(
    sandbox: Sandbox, endpoint: str, elsewhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written through the proxy that serves the log, which another one named, and read."""
    name = f"recipes/{uuid4().hex}"
    with open_namespace(sandbox.uri) as namespace:
        log = namespace.open_log(name, create_if_missing=True)
        with log.open_writer() as writer:
            for number in range(RECORDS):
                writer.write(LogRecord(number, f"{number}".encode()))
    known: dict[str, Any] = {}
    found = [
        block
        for each in ("pyarrow", "Polars", "DuckDB", "This library")
        for block in blocks(section(each, endpoint, elsewhere), "python")
    ]
    assert len(found) == 8
    for block in found:
        exec(block.replace('"clicks"', f'"{name}"'), known)
    assert payloads_in(sandbox.uri, elsewhere) == [b"%d" % number for number in range(RECORDS)]
    assert known["frame"].height == RECORDS
    assert known["table"].num_rows == 100
    told = capsys.readouterr().out
    assert told.startswith("100 b'100'\n")
    assert "[(1000, 999, 2.89)]\n" in told
    assert told.endswith(" b'999'\n")


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("language", FILES)
def test_another_language(
    sandbox: Sandbox,
    endpoint: str,
    elsewhere: str,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    language: str,
) -> None:
    """Built from the docs; it creates a log, writes through who serves it, and reads it all."""
    for tool in TOOLS[language]:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, which the recipe for {language} needs")
    text = section(language, endpoint, elsewhere)
    for kind, path in FILES[language].items():
        (block,) = blocks(text, kind)
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(block, encoding="utf-8")
    (commands,) = blocks(text, "sh")
    assert pytestconfig.cache is not None
    built = pytestconfig.cache.mkdir("recipes")  # what cargo would compile again each time
    result = subprocess.run(
        ["sh", "-ec", commands],
        cwd=tmp_path,
        env={**os.environ, "CARGO_TARGET_DIR": str(built), "CARGO_PROFILE_DEV_DEBUG": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert payloads_in(sandbox.uri, elsewhere) == [b"%d" % number for number in range(RECORDS)]
    told = result.stdout[
        result.stdout.index("{") :
    ].splitlines()  # Maven colours what it does not say
    assert json.loads(told[0])["location"] != endpoint
    assert told[1].startswith("0 .. ")
    assert told[-1].endswith(f" .. {RECORDS - 1}")
