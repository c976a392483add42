"""An auto-recovery process of the chaos run, with delays short enough to matter within a minute.

`python -m tests.chaos.autorecovery NAME URI`
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import sys
from contextlib import AsyncExitStack

from dlcore.autorecovery.config import AutoRecoveryConfig
from dlcore.autorecovery.service import AutoRecovery
from dlcore.autorecovery.services import RecoveryServices
from dlcore.clock import SystemClock
from dlcore.errors import DLError
from dlcore.ledger.client import LedgerClient
from dlcore.ledger.registry import BookieRegistry
from dlcore.ledger.store import LedgerStore
from dlcore.metadata.binding import read_binding
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.transport.client import WireBookieClient
from tests.chaos.client import CLIENT_CONFIG
from tests.chaos.plan import BOOKIE_SESSION_S

logger = logging.getLogger(__name__)

CONFIG = AutoRecoveryConfig(
    lost_bookie_delay_s=2.0,  # a paused or cut bookie counts as lost, and comes back
    open_ledger_grace_s=3.0,
    audit_interval_s=15.0,
    check_interval_s=20.0,
    check_ledgers_per_s=20.0,
    poll_interval_s=0.5,
    retry_pause_s=0.5,
    retry_pause_s_max=4.0,
)


async def open_services(uri: str, resources: AsyncExitStack) -> RecoveryServices:
    """Return the ports of the namespace at `uri`, closed with `resources`."""
    parsed = parse_uri(uri)
    paths = NamespacePaths(parsed.root)
    clock = SystemClock()
    rng = random.Random(clock.new_token())
    store = await ZooKeeperStore.connect(parsed.servers, session_timeout_s=BOOKIE_SESSION_S)
    resources.push_async_callback(store.aclose)
    binding = await read_binding(store, paths)
    registry = BookieRegistry(store, paths)
    resources.callback(registry.close)
    bookies = WireBookieClient(
        registry.resolve,
        cluster_id=binding.cluster_id,
        config=CLIENT_CONFIG,
        resolve_control=registry.resolve_control,
    )
    resources.push_async_callback(bookies.aclose)
    ledgers = LedgerStore(store, paths)
    client = LedgerClient(
        ledgers=ledgers,
        registry=registry,
        bookies=bookies,
        config=CLIENT_CONFIG,
        clock=clock,
        rng=rng,
    )
    resources.push_async_callback(client.aclose)
    return RecoveryServices(
        store=store,
        paths=paths,
        ledgers=ledgers,
        registry=registry,
        bookies=bookies,
        client=client,
        client_config=CLIENT_CONFIG,
        clock=clock,
        rng=rng,
    )


async def run(name: str, uri: str) -> None:
    """Audit and repair until SIGTERM."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    while True:
        try:
            async with AsyncExitStack() as resources:
                services = await open_services(uri, resources)
                await AutoRecovery(services, config=CONFIG, owner=name).run()
        except DLError:
            logger.exception("auto-recovery of %s begins again", name)
            await asyncio.sleep(0.5)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(run(*sys.argv[1:]))
    except asyncio.CancelledError:
        sys.exit(0)
