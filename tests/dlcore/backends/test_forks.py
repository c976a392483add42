"""Forks through proxies: as over bookies, and a lost answer makes no second one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.config import LogSettings
from dlcore.base.errors import ConfigurationError, LogExistsError, LogNotFoundError
from dlcore.base.ids import DLSN
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.tierer import LogTierer
from tests.dlcore.backends.test_lost_answers import losing_the_answer
from tests.dlcore.backends.test_writing import numbered
from tests.fixtures.memory_namespace import read_all
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from dlcore.api.namespace import Namespace


async def fill(served: Proxies) -> Namespace:
    """Make a log whose one segment is cold; return the namespace over bookies."""
    direct = served.cluster.namespaces[0]
    settings = LogSettings(tier="s3://bucket/logs", tier_after_s=0)
    await direct.create_log("cold", settings=settings)
    log = await direct.open_log("cold")
    async with await log.open_writer() as writer:
        writer.write_bulk(numbered(0, 10))
    await LogTierer(direct.log_context, direct.staging_owner, UpkeepConfig()).tier(log._log)
    return direct


def test_a_fork_is_made_once() -> None:
    """Asked for again after a lost answer, it is the same one, whatever the source has by then."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        direct = await fill(served)
        before = await read_all(await direct.open_log("cold"))  # type: ignore[arg-type]
        async with await open_namespace(served.servers[0].location) as namespace:

            async def delete_source() -> None:
                await direct.delete_log("cold")

            assert await namespace.fork_log("cold", "first", at=DLSN(1, 1, 0)) == DLSN(1, 1, 0)
            with losing_the_answer("fork", delete_source):
                assert await namespace.fork_log("cold", "test") == DLSN(2, 0, 0)
            assert await read_all(await direct.open_log("test")) == before  # type: ignore[arg-type]
            with pytest.raises(LogExistsError):
                await namespace.fork_log("test", "test")
            with pytest.raises(LogNotFoundError):
                await namespace.fork_log("cold", "more")
            with pytest.raises(ConfigurationError, match="expected 1:1:0 or 1:2:0"):
                await namespace.fork_log("test", "more", at=DLSN(1, 1, 1))

    with_proxies()(scenario)
