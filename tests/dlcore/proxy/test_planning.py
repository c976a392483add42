"""Planners of reads get places by any kind of position, and errors for what is gone."""

from __future__ import annotations

import base64
from typing import Any

import grpc
import pytest

from dlcore.base.ids import DLSN
from dlcore.log.reading.scan import unpack_snapshots
from dlcore.proxy.reading import planning
from tests.fixtures.memory_namespace import record
from tests.fixtures.served_proxies import Proxies, with_proxies


async def fill(served: Proxies) -> tuple[str, Any]:
    """Write three records to log a; return its id and a client of a proxy."""
    client = await served.start()
    log = await served.cluster.namespaces[0].open_log("a")
    async with await log.open_writer() as writer:
        for txid in (10, 20, 30):
            await writer.write(record(txid))
    return log.log_id, client


def test_positions_of_a_log() -> None:
    """Its first and last record and its end, and records by what they hold, or the end."""

    async def scenario(served: Proxies) -> None:
        log_id, client = await fill(served)

        async def positions(log: str, *at: dict[str, Any]) -> tuple[Any, ...]:
            reply = await client.act("positions", log=log, at=at)
            found = [reply["first"], reply["last"], reply["end"], *reply["positions"]]
            assert reply["log_id"] == log_id or log == "empty"
            return tuple(each and (each["dlsn"], each["sequence_id"]) for each in found)

        first, last, end = ("1:0:0", 0), ("1:2:0", 2), ("1:3:0", 3)
        assert await positions("a") == (first, last, end)
        at: list[dict[str, Any]] = [
            {"txid": 11},
            {"txid": 31},
            {"sequence_id": 2},
            {"time": "2020-01-01T00:00:00Z"},
        ]
        found = await positions("a", *at, {"dlsn": "1:1:0"}, {"latest": True})
        assert found[3:] == (("1:1:0", 1), end, last, first, ("1:1:0", 1), end)
        log = await served.cluster.namespaces[0].open_log("a")
        await log.truncate(DLSN(1, 1, 0))
        assert await positions("a", {"txid": 0}) == (("1:1:0", 1), last, end, ("1:1:0", 1))
        await served.cluster.namespaces[0].create_log("empty")
        assert (await positions("empty", {"txid": 5}))[:2] == (None, None)
        for wrong in ({}, {"txid": 1, "latest": True}):
            with pytest.raises(grpc.aio.AioRpcError, match="expected one of dlsn, txid, time"):
                await positions("a", wrong)

    with_proxies("a")(scenario)


def test_places_by_any_position() -> None:
    """None is beyond the end that the planner knows."""

    async def scenario(served: Proxies) -> None:
        log_id, client = await fill(served)
        known = {"log": "a", "log_id": log_id, "end": "1:2:0"}
        found = await client.act(
            "places",
            searches=[
                {**known, "at": at}
                for at in ({"txid": 15}, {"latest": True}, {"dlsn": "1:0:0"}, {"sequence_id": 2})
            ],
        )
        assert [(each["dlsn"], each["sequence_id"]) for each in found["places"]] == [
            ("1:1:0", 1),
            ("1:2:0", 2),
            ("1:0:0", 0),
            ("1:2:0", 2),
        ]
        packed = (await client.act("snapshots", logs=["a", "none"]))["snapshots"]
        (snapshot,) = unpack_snapshots(base64.b64decode(packed))
        assert (snapshot.log, str(snapshot.end)) == ("a", "1:3:0")

    with_proxies("a")(scenario)


def test_only_writers_learn_of_seals() -> None:
    """Readers pay for no read of heads, and clients of 0.2.0 ask as readers do."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        direct = served.cluster.namespaces[0]
        await (await direct.open_log("a")).mark_end_of_stream()
        asked = ["a", "b", "none"]
        schemas = {"a": None, "b": None}
        assert await client.act("schemas", logs=asked) == {"schemas": schemas, "sealed": []}
        answer = await client.act("schemas", logs=asked, for_write=True)
        assert answer == {"schemas": schemas, "sealed": ["a"]}

    with_proxies("a", "b")(scenario)


def test_places_in_a_part_that_is_truncated() -> None:
    """A planner finds out by them whether records were truncated that it is asked for."""

    async def scenario(served: Proxies) -> None:
        log_id, client = await fill(served)
        await (await served.cluster.namespaces[0].open_log("a")).truncate(DLSN(1, 2, 0))
        for first, place in (("1:0:0", "1:1:0"), (None, "1:2:0"), ("1:3:0", "1:3:0")):
            search = {"log": "a", "log_id": log_id, "end": "1:3:0", "at": {"txid": 15}}
            found = await client.act("places", searches=[{**search, "first": first}])
            assert [each["dlsn"] for each in found["places"]] == [place]

    with_proxies("a")(scenario)


def test_a_planner_gets_only_what_it_does_not_know() -> None:
    """Everything about another log of that name is new."""

    async def scenario(served: Proxies) -> None:
        log_id, client = await fill(served)
        log = await served.cluster.namespaces[0].open_log("a")
        async with await log.open_writer() as writer:
            await writer.write(record(40))
        for known, lssns in (
            ({"log_id": log_id, "lssn": 2}, [2]),
            ({"log_id": log_id, "lssn": 1}, [1, 2]),
            ({"log_id": "other", "lssn": 2}, [1, 2]),
        ):
            reply = await client.act("snapshots", logs=["a", "none"], known={"a": known})
            (snapshot,) = unpack_snapshots(base64.b64decode(reply["snapshots"]))
            assert [each.lssn for each in snapshot.segments] == lssns

    with_proxies("a")(scenario)


def test_gone_logs_and_unknown_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log of another id is not searched; records to come are waited for, for a while."""
    monkeypatch.setattr(planning, "_LOOKS_S", (0.0, 0.01))

    async def scenario(served: Proxies) -> None:
        log_id, client = await fill(served)
        for wrong, code, reason in (
            ({"log_id": "other"}, grpc.StatusCode.NOT_FOUND, "is gone, or has another name"),
            ({"log": "none"}, grpc.StatusCode.NOT_FOUND, "is gone, or has another name"),
            ({"end": "5:0:0"}, grpc.StatusCode.UNAVAILABLE, "try again"),
            ({"end": "x"}, grpc.StatusCode.INVALID_ARGUMENT, "x"),
            ({"first": "x"}, grpc.StatusCode.INVALID_ARGUMENT, "x"),
        ):
            search = {"log": "a", "log_id": log_id, "end": "1:3:0", "at": {"txid": 1}} | wrong
            with pytest.raises(grpc.aio.AioRpcError, match=reason) as caught:
                await client.act("places", searches=[search])
            assert caught.value.code() is code

    with_proxies("a")(scenario)
