"""What a command imports before it works: start-up time, counted in modules and not in seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

HELP = "import dlcore.cli.app"
CLUSTER = f"{HELP}, dlcore.namespace, dlcore.metadata.zookeeper, dlcore.transport.client"
HEAVY = ("bookie", "duckdb", "google", "grpc", "pandas", "polars", "pyspark", "rich", "uvloop")
CLIENTS = ("dlcore.namespace", "dlcore.sandbox", "dlcore.sync", "kazoo", "numpy", "pyarrow")


@pytest.mark.parametrize(
    ("statement", "left_out", "modules_max"),
    # Measured beside much other work: 0.15 s of CPU time for help, 0.40 to 0.46 s for the others.
    [(HELP, HEAVY + CLIENTS, 280), (CLUSTER, (*HEAVY, "dlcore.sandbox", "dlcore.sync"), 580)],
    ids=["help", "a command that asks the cluster"],
)
def test_a_command_imports_little(
    statement: str, left_out: tuple[str, ...], modules_max: int
) -> None:
    """Help, completion and wrong command lines need no client; no command needs all there is."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {statement}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = done.stdout.split()
    loaded = {name for name in left_out if any(f"{m}.".startswith(f"{name}.") for m in modules)}
    assert not loaded
    assert len(modules) <= modules_max
