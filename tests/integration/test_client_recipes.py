"""The recipes of docs/clients-*.md, run as they stand there: by Arrow's own clients, unmodified."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow.flight as flight
import pytest

from dlcore.sync import open_namespace
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.lengths import amount
from tests.fixtures.ports import free_ports
from tests.fixtures.proxies import act, log_name_for, payloads_in, two_proxies
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration

WAIT_S = 60
RECORDS = 1000
MANY = amount(200_000, sampled=10_000)
RATE = MANY // 10
FILES = {
    "Go": {"go": "main.go"},
    "Java": {"java": "src/main/java/Recipe.java", "xml": "pom.xml"},
    "Rust": {"rust": "src/main.rs", "toml": "Cargo.toml"},
}
TOOLS = {"Go": ["go"], "Java": ["mvn", "java"], "Rust": ["cargo"]}


@pytest.fixture(scope="module")
def endpoint(sandbox: Sandbox) -> Iterator[str]:
    """One of two proxies."""
    with two_proxies(sandbox.uri) as (first, _):
        yield first.location


@pytest.fixture
def elsewhere(endpoint: str) -> str:
    """The name of a log that there is not yet, and that the other proxy will serve."""
    with flight.connect(endpoint) as client:
        while True:
            name = f"recipes/{uuid4().hex}"
            if act(client, "owner", log=name)["location"] != endpoint:
                return name


def section(name: str, log: str, *endpoints: str) -> str:
    """Return what the docs say of a language, with addresses and a log that there are."""
    text = (REPOSITORY / f"docs/clients-{name.lower()}.md").read_text(encoding="utf-8")
    assert "```" in text
    addresses = ", ".join(f'"{each}"' for each in endpoints)
    text = text.replace('"grpc://127.0.0.1:2185"', addresses).replace('"orders"', json.dumps(log))
    return text.replace('"log": "orders"', f'"log": "{log}"')


def blocks(text: str, language: str) -> list[str]:
    """Return the blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def program(language: str, text: str, folder: Path, pytestconfig: pytest.Config) -> list[str]:
    """Write down a recipe, and return the command that builds and runs it."""
    if language == "pyarrow":
        (folder / "recipe.py").write_text(blocks(text, "python")[0], encoding="utf-8")
        return [sys.executable, "recipe.py"]
    for tool in TOOLS[language]:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, which the recipe for {language} needs")
    for kind, path in FILES[language].items():
        (block,) = blocks(text, kind)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(block, encoding="utf-8")
    (commands,) = blocks(text, "sh")
    assert pytestconfig.cache is not None
    built = shlex.quote(str(pytestconfig.cache.mkdir("recipes")))  # else cargo compiles all again
    settings = f"export CARGO_TARGET_DIR={built} CARGO_PROFILE_DEV_DEBUG=0"
    return ["sh", "-ec", f"{settings}\n{commands}"]


def kill(owner: ProxyProcess) -> None:
    """End a proxy at once."""
    owner.kill()


def freeze(owner: ProxyProcess) -> None:
    """Stop a proxy in the middle of what it does, for good."""
    owner.process.send_signal(signal.SIGSTOP)


def drain(owner: ProxyProcess) -> None:
    """Let a proxy hand its logs on."""
    owner.act("drain")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", [kill, freeze, drain], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize(
    "language",
    ["pyarrow", *(pytest.param(each, marks=pytest.mark.prove) for each in ("Go", "Java", "Rust"))],
)
def test_a_recipe_goes_on_at_another_proxy(
    sandbox: Sandbox,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    language: str,
    fault: Callable[[ProxyProcess], None],
) -> None:
    """Whatever becomes of the one that serves its log; the first one that it knows is dead.

    Each record is there once, in order.
    """
    # Without a limit a client may have written all before the test knows that it has begun.
    slowly = f"--log-records-per-s={RATE}"
    with (
        two_proxies(sandbox.uri, slowly, is_killed=True) as (owner, other),
        open_namespace(sandbox.uri) as namespace,
    ):
        name = log_name_for(owner, sandbox.uri)

        def is_under_way() -> bool:
            is_there = namespace.log_exists(name)
            return is_there and namespace.open_log(name).get_log_record_count() > RECORDS

        dead = f"grpc://127.0.0.1:{free_ports(1)}"
        text = section(language, name, dead, owner.location, other.location)
        text = text.replace("1000)", f"{MANY})").replace("< 1000;", f"< {MANY};")
        text = text.replace("0..1000", f"0..{MANY}")
        command = program(language, text, tmp_path, pytestconfig)
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as running:
            try:
                wait_until(lambda: running.poll() is not None or is_under_way(), timeout_s=600)
                assert running.poll() is None, running.stderr and running.stderr.read()
                fault(owner)
                _, errors = running.communicate(timeout=WAIT_S * 2)
            finally:
                running.kill()
                owner.process.kill()
        assert running.returncode == 0, errors
    assert payloads_in(sandbox.uri, name) == [b"%d" % number for number in range(MANY)]


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
    command = program(language, section(language, elsewhere, endpoint), tmp_path, pytestconfig)
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert payloads_in(sandbox.uri, elsewhere) == [b"%d" % number for number in range(RECORDS)]
    output = result.stdout[
        result.stdout.index("{") :
    ].splitlines()  # Maven colours what it does not say
    assert json.loads(output[0])["location"] != endpoint
    assert output[1].startswith("0 .. ")
    assert output[-1].endswith(f" .. {RECORDS - 1}")
