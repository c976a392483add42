"""The README's blocks, pasted in order by a new user, each of them twice, do what they show."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.forked_commands import environment_at
from tests.fixtures.pages import blocks_of
from tests.fixtures.ports import free_ports
from tests.fixtures.spark import settings_in

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 240

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(900)]


def test_the_blocks_of_the_readme_run_as_they_stand(tmp_path: Path, dlog_program: Path) -> None:
    """One shell with its sandbox, and the Python blocks in it, one after the other."""
    environment_at(tmp_path, dlog_program)
    # The ports of its sandbox may be taken here: those after another one are not.
    base_port = free_ports(5)
    places = {"zookeeper": f"127.0.0.1:{base_port}", "proxy": f"127.0.0.1:{base_port + 4}"}
    blocks = [each.at(**places) for each in blocks_of("README.md") if each.language]
    assert [each.language for each in blocks] == ["bash", "bash", "python", "python"]
    sandbox = blocks.pop(0).text.replace("--base-port 2181", f"--base-port {base_port}")
    script = [
        "set -eu -o pipefail",
        "trap 'echo done' EXIT",  # also of one that fails
        f"({sandbox}) > sandbox.txt & sandbox=$!",
        "until grep -q 'export DLOG_URI' sandbox.txt; do kill -0 $sandbox; sleep 0.1; done",
    ]
    for each in blocks:
        text = 2 * each.text
        bare = "env --unset=DLOG_URI .venv/bin/python"  # each may be pasted by itself
        script.append(text if each.language == "bash" else f"{bare} - <<'END'\n{text}END")
    script.append(".venv/bin/dlog log count clicks; .venv/bin/dlog log count copy")
    environment = {key: value for key, value in os.environ.items() if key != "DLOG_URI"}
    # The session that they start is as small as those of other tests.
    settings = [f"--conf={key}={value}" for key, value in settings_in(tmp_path).items()]
    environment["PYSPARK_SUBMIT_ARGS"] = shlex.join([*settings, "pyspark-shell"])
    with (
        (tmp_path / "errors").open("wb") as errors,
        subprocess.Popen(
            ["bash", "-c", "\n".join(script)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as shell,
    ):
        try:
            assert shell.stdout is not None
            lines = []
            for line in shell.stdout:
                lines.append(line.strip())
                if lines[-1] == "done":
                    break
            assert shell.wait(WAIT_S) == 0, (tmp_path / "errors").read_text()
        finally:
            os.killpg(shell.pid, signal.SIGTERM)  # the sandbox stops what it started
            assert shell.stdout is not None
            shell.stdout.read()  # until the last of them has ended
    # Twice 3 of the shell, 1 of Python and 2 of Spark, which copied all of them.
    assert lines[-3:] == ["12", "12", "done"]
    assert any(" b'1'" in line for line in lines), "\n".join(lines)  # of a reader
