"""Imports of a command before it works: start-up time, counted in modules and not in seconds.

Modules of the standard library do not count, for how many it has of its own differs by version, nor
those that every program of an installation loads.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

HELP = "import dlcore.ops.cli.app"
LAZY = f"{HELP}; dlcore.ops.cli.app.load_lazily(); import "
CLIENT = f"{LAZY} dlcore.metadata.zookeeper, dlcore.wire.client"
CLUSTER = f"{CLIENT}, dlcore.backends.direct.namespace"
WRITE = f"{CLIENT}, dlcore.sync, dlcore.log.writing.opening"
ENDPOINT = f"{LAZY} dlcore.backends.flight.namespace"
ENDPOINT_WRITE = f"{LAZY} dlcore.sync, dlcore.backends.flight.writing"
CONTROL = "dlcore.wire.control"
AUTORECOVERY = f"{CLUSTER}, dlcore.ops.autorecovery.service, dlcore.ops.upkeep.worker, {CONTROL}"
PROXY = f"{CLUSTER}, dlcore.proxy.server"
BOOKIE = "import bookie.__main__, bookie.server"

FRAMES = ("duckdb", "pandas", "polars", "pyspark", "rich", "dlcore.ops.sandbox")
GRPC = ("google", "grpc")
# These three load their contents when something is asked of them.
ARRAYS = ("crc32c.crc32c", "crc32c._crc32c", "numpy._core", "pyarrow.lib")
HEAVY = ("bookie", "uvloop", *FRAMES, *GRPC, *ARRAYS)
WRITERS = ("dlcore.log.writing.append", "dlcore.log.staging", "tomllib")
CLIENTS = ("dlcore.backends.direct.namespace", "dlcore.sync", "kazoo", "numpy", "pyarrow")


def modules_after(statement: str) -> list[str]:
    """Return the names of what a Python has loaded once a statement has run."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {statement}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("statement", "left_out", "modules_max"),
    # Measured beside much other work, in CPU time: 0.17 s for help, 0.28 to 0.4 s for what asks
    # and writes, 0.4 to 0.6 s for servers, which load what their first client would wait for.
    [
        (HELP, HEAVY + CLIENTS, 110),
        (CLUSTER, (*HEAVY, *WRITERS, "dlcore.sync"), 256),
        (WRITE, ("bookie", "dlcore.log.staging", *FRAMES, *GRPC, *ARRAYS), 218),
        (ENDPOINT, ("bookie", "uvloop", *WRITERS, *CLIENTS[:3], *FRAMES, *ARRAYS), 230),
        (
            ENDPOINT_WRITE,
            ("bookie", "dlcore.backends.direct.namespace", "kazoo", *FRAMES, *ARRAYS),
            232,
        ),
        (AUTORECOVERY, ("bookie", "uvloop", *FRAMES, *ARRAYS), 362),
        (PROXY, ("bookie", "dlcore.backends.flight", *FRAMES), 480),
        (BOOKIE, ("dlcore.ops.cli", "dlcore.backends.direct.namespace", "pyarrow", *FRAMES), 323),
    ],
    ids=[
        "help",
        "a command that asks the cluster",
        "one that writes",
        "one that asks proxies",
        "one that writes through them",
        "auto-recovery",
        "a proxy",
        "a bookie",
    ],
)
def test_a_command_imports_little(
    statement: str, left_out: tuple[str, ...], modules_max: int
) -> None:
    """Help, completion and wrong command lines need no client; no command needs all there is.

    Those that ask or write load neither Arrow nor numpy before there is a record.
    """
    modules = modules_after(statement)
    loaded = {name for name in left_out if any(f"{m}.".startswith(f"{name}.") for m in modules)}
    assert not loaded
    passed_over = {*sys.stdlib_module_names, *modules_after("pass")}
    own = [name for name in modules if name.partition(".")[0] not in passed_over]
    assert len(own) <= modules_max


def test_lazily_loaded_modules_are_complete() -> None:
    """The stand-in of a module has all of it; its parts and later imports are the real ones."""
    code = """if True:
        import sys
        from dlcore.ops.cli.app import load_lazily
        load_lazily()
        import crc32c, numpy as np, pyarrow as pa
        assert "numpy._core" not in sys.modules
        import pyarrow.compute as pc
        assert pc.sum(pa.array([1, 2])).as_py() == 3
        assert np.arange(3).sum() == 3 and np.linalg.norm([3, 4]) == 5.0
        assert crc32c.crc32c(b"123456789") == 0xE3069283
        import numpy, pyarrow
        assert numpy is not np and numpy.dtype is np.dtype and pyarrow.Array is pa.Array
        assert isinstance(pa.array([1.0]).to_numpy(), np.ndarray)
        try:
            np.no_such_name
        except AttributeError as error:
            assert "no_such_name" in str(error)
        load_lazily()
        assert sys.modules["numpy"] is numpy
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
