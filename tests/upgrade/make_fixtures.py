"""Makes the stored formats of a release: ``python -m tests.upgrade.make_fixtures 0.2.0``.

Run it once, when the release is out.  `tests/fixtures/releases/<version>` gets the folder of a
bookie, that of the metadata server, a checkpoint of Spark, the messages of the wire, and what the
release itself read of all that.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.upgrade.cluster import Mixed
from tests.upgrade.formats import KEY_LINE
from tests.upgrade.releases import REPOSITORY, commit_of, install

FIXTURES = REPOSITORY / "tests" / "fixtures" / "releases"
STORED = ("b1", "metadata", "checkpoint")
"""The folders, as `Mixed` names them."""
_VECTORS = "tests/contracts/wire_vectors.json"


def make(version: str, target: Path, work: Path) -> None:
    """Let a release write into `work`, and keep what it stored in `target`."""
    release = install(version, work / "release")
    (work / "keys").touch(mode=0o600)
    (work / "keys").write_text(KEY_LINE)
    with Mixed(work, release) as cluster:
        cluster.bookie("b1", "--file-bytes-max", "12000").start(release)
        given = (cluster.uri, str(work / "keys"))
        cluster.program("formats", "write", *given).start(release).ended()
        assert cluster.job("renamed", "copy").start(release).ended().endswith("at 1\n")
        output = cluster.program("formats", "tell", *given).start(release).ended()
    target.mkdir(parents=True)
    for name in STORED:
        shutil.copytree(
            work / name, target / name, ignore=shutil.ignore_patterns("reserve", "lock")
        )
    (target / "told.json").write_text(output.splitlines()[-1] + "\n")
    show = ["git", "show", f"{commit_of(version)}:{_VECTORS}"]
    vectors = subprocess.run(show, cwd=REPOSITORY, capture_output=True, check=True)
    (target / "wire.json").write_bytes(vectors.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade.make_fixtures")
    parser.add_argument("version")
    wanted = parser.parse_args().version
    with tempfile.TemporaryDirectory() as folder:
        make(wanted, FIXTURES / wanted, Path(folder))
