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
from dlcore.log.typed.schema import Target
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


def test_many_targets_cost_two_round_trips_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the names, one for heads and schemas of logs of both kinds; then one for all.

    Names that lead to other logs by now, or to none, are noticed.
    """

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

        async def schemas(round_trips: int) -> dict[str, pa.Schema | None]:
            calls.clear()
            found: dict[str, pa.Schema | None] = await namespace.get_schemas(names, for_write=True)
            assert calls == {"get_many": round_trips}
            return found

        there = {"clicks": None, **dict.fromkeys(names[1:], COLUMNS)}
        assert await schemas(2) == there
        assert await schemas(1) == there
        for name in names[:2]:
            await namespace.delete_log(name)
        left = {name: there[name] for name in names[2:]}
        assert await schemas(1) == left
        await namespace.create_log("trips/0")
        await namespace.rename_log("trips/1", "clicks")
        assert await schemas(2) == {"clicks": COLUMNS, "trips/0": None, "trips/2": COLUMNS}
        assert await schemas(1) == {"clicks": COLUMNS, "trips/0": None, "trips/2": COLUMNS}
        await namespace.delete_log("clicks")
        await namespace.create_log("clicks")
        assert await schemas(2) == {"clicks": None, "trips/0": None, "trips/2": COLUMNS}
        await (await namespace.open_log("clicks")).mark_end_of_stream()
        with pytest.raises(EndOfStreamError, match="'clicks' is sealed"):
            await schemas(1)

    on_log(body)


def test_few_targets_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest; the others cost a second round trip again."""
    monkeypatch.setattr("dlcore.log.metadata.store._KNOWN_MAX", 2)

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        logs = namespace.log_context.logs
        for name in ("a", "b"):
            await namespace.create_log(name)
        for name in ("clicks", "a", "clicks", "b"):
            assert [*await logs.find_targets([name])] == [name]
        assert [*logs._targets._known] == ["clicks", "b"]

    on_log(body)


def _delete_after_a_read(
    monkeypatch: pytest.MonkeyPatch, cluster: MemoryCluster, name: str
) -> None:
    """Let a log be deleted when the next nodes were read."""
    store = cluster.stores["a"]
    get_many = store.get_many

    async def found_and_deleted(paths: list[str], *, fresh: bool) -> Any:
        found = await get_many(paths, fresh=fresh)
        monkeypatch.undo()
        await cluster.namespaces[0].delete_log(name)
        return found

    monkeypatch.setattr(store, "get_many", found_and_deleted)


@pytest.mark.parametrize("name", ["clicks", "trips"])
def test_a_log_that_is_deleted_meanwhile(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Between the two reads: as if it had not been there."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await namespace.create_log("trips", schema=COLUMNS)
        logs = namespace.log_context.logs
        _delete_after_a_read(monkeypatch, cluster, name)
        left = {"clicks": Target(None, False), "trips": Target(COLUMNS, False)}
        del left[name]
        assert await find_targets(logs, ["clicks", "trips"]) == left

    on_log(body)


def test_a_log_that_had_the_name_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no target by that name, also if the log that has the name now is just deleted."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        logs = namespace.log_context.logs
        assert [*await find_targets(logs, ["clicks"])] == ["clicks"]
        await namespace.rename_log("clicks", "older")
        await namespace.create_log("clicks")
        _delete_after_a_read(monkeypatch, cluster, "clicks")
        assert await find_targets(logs, ["clicks", "older"]) == {"older": Target(None, False)}

    on_log(body)


def test_a_proxy_of_an_earlier_release_tells_of_no_seal() -> None:
    """The commit refuses the records then."""
    answer = msgspec.json.decode(b'{"schemas":{"clicks":null}}', type=LogSchemas)
    assert answer == LogSchemas({"clicks": None}, [])
