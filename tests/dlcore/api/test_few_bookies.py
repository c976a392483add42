"""Creation of a log that is to have more bookies than are registered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.config import LogConfig, QuorumConfig
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.memory_namespace import memory_cluster

if TYPE_CHECKING:
    import pytest


def test_a_log_that_wants_more_bookies_than_there_are_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """When it is created, since its first write comes late; it is no error, for they may come."""

    async def scenario() -> None:
        async with memory_cluster(bookie_count=3) as cluster:
            namespace = await cluster.open("a")
            await namespace.create_log("enough", config=LogConfig(quorum=QuorumConfig(3, 3, 2)))
            assert caplog.text == ""
            await namespace.create_log("clicks", config=LogConfig(quorum=QuorumConfig(5, 3, 2)))

    run_in_own_time(scenario())
    assert "log 'clicks' needs 5 bookies (E/Qw/Qa 5/3/2), but 3 are registered" in caplog.text
