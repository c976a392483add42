"""A writer asks for kind, columns and seal of its logs at once.

Goal: a sealed log is an error, and a log that is deleted meanwhile counts as if it were not there.
Spark asks before each micro-batch, so that each round trip counts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest

from dlcore.base.errors import EndOfStreamError
from dlcore.flight.answers import LogSchemas
from dlcore.log.reading.schemas import find_targets
from dlcore.log.typed.targets import Target
from tests.fixtures.memory_namespace import on_log

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from tests.fixtures.memory_namespace import MemoryCluster

COLUMNS = pa.schema([("km", pa.int32())])


def test_a_sealed_log_is_no_target() -> None:
    """It is an error for a writer, and has a schema for others."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await namespace.create_log("trips", schema=COLUMNS)
        names = ["clicks", "trips", "none"]
        there = {"clicks": None, "trips": COLUMNS}
        assert await namespace.get_schemas(names, for_write=True) == there
        assert await namespace.get_schemas([], for_write=True) == {}
        await log.mark_end_of_stream()
        with pytest.raises(EndOfStreamError, match="log 'clicks' is sealed: no record can follow"):
            await namespace.get_schemas(names, for_write=True)
        assert await namespace.get_schemas(names) == there
        assert await namespace.get_schemas(["trips"], for_write=True) == {"trips": COLUMNS}

    on_log(body)


def test_many_targets_cost_two_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the names, one for heads and schemas of logs of both kinds."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace, store = cluster.namespaces[0], cluster.stores["a"]
        for number in range(3):
            await namespace.create_log(f"trips/{number}", schema=COLUMNS)
        calls: Counter[str] = Counter()

        def count(name: str) -> None:
            call = getattr(store, name)

            async def counted(*args: Any, **more: Any) -> Any:
                calls[name] += 1
                return await call(*args, **more)

            monkeypatch.setattr(store, name, counted)

        for name in ("get", "get_many", "get_children", "sync"):
            count(name)
        names = ["clicks", *(f"trips/{number}" for number in range(3))]
        assert len(await namespace.get_schemas(names, for_write=True)) == 4
        assert calls == {"get_many": 2}

    on_log(body)


@pytest.mark.parametrize("name", ["clicks", "trips"])
def test_a_log_that_is_deleted_meanwhile(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Between the two reads: as if it had not been there."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await namespace.create_log("trips", schema=COLUMNS)
        logs = namespace.log_context.logs
        find = logs.find_existing

        async def found_and_deleted(names: list[str]) -> Any:
            found = await find(names)
            monkeypatch.undo()
            await namespace.delete_log(name)
            return found

        monkeypatch.setattr(logs, "find_existing", found_and_deleted)
        left = {"clicks": Target(None, False), "trips": Target(COLUMNS, False)}
        del left[name]
        assert await find_targets(logs, ["clicks", "trips"]) == left

    on_log(body)


def test_a_proxy_of_an_earlier_release_tells_of_no_seal() -> None:
    """The commit refuses the records then."""
    answer = msgspec.json.decode(b'{"schemas":{"clicks":null}}', type=LogSchemas)
    assert answer == LogSchemas({"clicks": None}, [])
