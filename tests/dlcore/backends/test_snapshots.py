"""Snapshots over an endpoint: what came since the last one is asked for, and few are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.backends.flight import planning
from dlcore.backends.flight.namespace import open_namespace
from tests.dlcore.backends.test_writing import numbered
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    import pytest

LOGS = ("a", "b", "c")


def test_they_are_the_cores_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the logs asked for last, or all that are asked for at once; also one named twice."""
    monkeypatch.setattr(planning, "KNOWN_LOGS_MAX", 2)

    async def scenario(served: Proxies) -> None:
        await served.start()
        direct = served.cluster.namespaces[0]
        async with await open_namespace(served.servers[0].location) as namespace:
            kept = namespace._snapshots._known
            for number in range(3):
                for log in LOGS:
                    async with await (await direct.open_log(log)).open_writer() as writer:
                        writer.write_bulk(numbered(number, 1))
                for asked in ([*LOGS], ["a", "b"], ["a", "a"], ["c"]):
                    there = await direct.get_snapshots(asked, fresh=True)
                    assert await namespace.get_snapshots(asked) == there
                    assert len(kept) == (3 if asked == [*LOGS] else 2)
                assert list(kept) == ["a", "c"]
            await direct.delete_log("c")
            assert await namespace.get_snapshots(["c"]) == {"c": None}
            assert list(kept) == ["a"]

    with_proxies(*LOGS)(scenario)
