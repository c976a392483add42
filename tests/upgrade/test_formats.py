"""Everything that an earlier release stored or sent is read by this one.

Goal: no format is lost sight of.  Method: the fixtures that `make_fixtures.py` let each release
make.  This release starts on a copy, and reads what the release itself read of it.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from dlcore import LogRecord
from dlcore.sync import open_namespace
from dlspark.offsets import StreamOffset
from tests.dlcore.wire.test_vectors import fields_of, read_all
from tests.upgrade.cluster import Mixed
from tests.upgrade.formats import KEY_LINE, tell
from tests.upgrade.make_fixtures import FIXTURES, STORED
from tests.upgrade.releases import NOW

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RELEASES = sorted(each.name for each in FIXTURES.iterdir())


@pytest.fixture
def found(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Mixed, dict[str, Any]]]:
    """This release on what another one stored, with what that one read of it."""
    stored = FIXTURES / request.param
    for name in STORED:
        shutil.copytree(stored / name, tmp_path / name)
    with Mixed(tmp_path) as cluster:
        cluster.bookie("b1").start(NOW)
        yield cluster, json.loads((stored / "told.json").read_text())


@pytest.mark.integration
@pytest.mark.parametrize("found", RELEASES, indirect=True)
def test_data_that_a_release_stored_is_read(
    found: tuple[Mixed, dict[str, Any]], tmp_path: Path
) -> None:
    """Logs of every kind, with positions, settings and the rest; and they can be written to."""
    cluster, facts = found
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(KEY_LINE)
    with open_namespace(cluster.uri, encryption_keys=str(keys)) as namespace:
        assert tell(namespace) == facts
        assert len(facts["logs"]) == 7
        for name, before in facts["logs"].items():
            if before["ended"]:
                continue
            with namespace.open_log(name) as log, log.open_writer() as writer:
                if log.get_schema() is None:
                    writer.write(LogRecord(writer.last_txid + 1, b"one more"))
                else:
                    writer.write_table({"city": ["one more"]})
                writer.commit()
            assert len(tell(namespace)["logs"][name]["rows"]) == len(before["rows"]) + 1


# Fields that have another name now, which the wire does not have.
RENAMED = {"told_to": "known_to"}


@pytest.mark.parametrize("release", RELEASES)
def test_the_messages_of_a_release_are_understood(release: str) -> None:
    """Each has the same meaning today."""
    for vector in json.loads((FIXTURES / release / "wire.json").read_text()):
        (message,) = read_all(bytes.fromhex(vector["bytes"]))
        assert type(message).__name__ == vector["kind"]
        values = {RENAMED.get(name, name): value for name, value in vector["values"].items()}
        assert json.loads(json.dumps(fields_of(message))) == values


@pytest.mark.parametrize("release", RELEASES)
def test_the_offsets_of_a_release_are_read(release: str) -> None:
    """And Spark, which compares them as text, finds no difference in them."""
    lines = (FIXTURES / release / "checkpoint" / "offsets" / "0").read_text().splitlines()
    offset = json.loads(lines[-1])
    assert StreamOffset.from_json(offset).to_json() == offset


@pytest.mark.prove
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("found", RELEASES, indirect=True)
def test_a_query_goes_on_from_the_checkpoint_of_a_release(
    found: tuple[Mixed, dict[str, Any]],
) -> None:
    """Rows copied before are not copied again, and new ones are."""
    cluster, facts = found
    with open_namespace(cluster.uri) as namespace:
        with namespace.open_log("renamed") as log, log.open_writer() as writer:
            writer.write(LogRecord(writer.last_txid + 1, b"one more"))
        assert cluster.job("renamed", "copy").start(NOW).ended().endswith("at 1\n")
        with namespace.open_log("copy") as log:
            values = log.read().to_pandas()["value"].tolist()
    before = [row["value"] for row in facts["logs"]["copy"]["rows"]]
    assert [*map(str, values)] == [*before, "b'one more'"]
