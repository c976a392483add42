"""An auto-recovery process of the chaos run, with delays short enough to matter within a minute.

`python -m tests.chaos.autorecovery NAME URI`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

from dlcore.backends.direct.namespace import DirectNamespace
from dlcore.base.access.tls_in_use import TlsInUse
from dlcore.base.clock import SystemClock
from dlcore.base.config import LogConfig
from dlcore.base.errors import DLError, LogNotFoundError
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.log.metadata.listing import PAGE_SIZE, list_pages
from dlcore.log.upkeep.requests import ask_for_upkeep
from dlcore.metadata.binding import read_binding
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.ops.autorecovery.config import AutoRecoveryConfig
from dlcore.ops.autorecovery.joining import joined
from dlcore.ops.autorecovery.service import AutoRecovery
from dlcore.ops.upkeep.config import MergePolicy, UpkeepConfig
from dlcore.ops.upkeep.worker import LogUpkeep
from dlcore.wire.client import WireBookieClient
from tests.chaos.client import CLIENT_CONFIG, files_of
from tests.chaos.plan import BOOKIE_SESSION_S

if TYPE_CHECKING:
    from dlcore import TlsFiles
    from dlcore.log.context import LogContext

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
UPKEEP = UpkeepConfig(
    upkeep_interval_s=0.5,
    sweep_interval_s=2.0,
    merged_grace_s=1.0,  # readers are to find their ledgers gone
    leftovers_age_s=20.0,
    merge=MergePolicy(
        large_weight=100_000,
        fan_in=2,
        run_weight_max=200_000,
        run_extents_max=20,
        run_ledgers_max=10,
    ),
)
_ASK_EVERY_S = 1.0


async def open_namespace(uri: str, tls: TlsFiles | None) -> DirectNamespace:
    """Open the namespace at `uri`, with a session that ends as soon as the bookies'."""
    parsed = parse_uri(uri)
    paths = NamespacePaths(parsed.root)
    clock = SystemClock()
    store = await ZooKeeperStore.connect(parsed.servers, session_timeout_s=BOOKIE_SESSION_S)
    try:
        binding = await read_binding(store, paths)
    except BaseException:
        await store.aclose()
        raise
    registry = BookieRegistry(store, paths)
    bookies = WireBookieClient(
        registry.resolve,
        cluster_id=binding.cluster_id,
        config=CLIENT_CONFIG,
        resolve_control=registry.resolve_control,
        tls=TlsInUse.of(tls),
    )
    return DirectNamespace(
        uri=uri,
        store=store,
        bookies=bookies,
        paths=paths,
        cluster_id=binding.cluster_id,
        clock=clock,
        rng=random.Random(clock.new_token()),
        config=LogConfig(),
        client_config=CLIENT_CONFIG,
        client_id="auto-recovery",
        registry=registry,
    )


async def ask_for_merging(context: LogContext) -> None:
    """Ask for the upkeep of every log, much more often than commits do."""
    while True:
        pages = list_pages(context.store, context.paths, "", after=None, page_size=PAGE_SIZE)
        async for page in pages:
            for name in page:
                with contextlib.suppress(LogNotFoundError):  # it came and went
                    await ask_for_upkeep(context, {await context.logs.find(name): 1})
        await asyncio.sleep(_ASK_EVERY_S)


async def run(name: str, uri: str, tls: TlsFiles | None) -> None:
    """Audit, repair, merge and sweep until SIGTERM."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    while True:
        try:
            async with (
                await open_namespace(uri, tls) as namespace,
                joined(namespace.ports, owner=name),
            ):
                also = (
                    LogUpkeep.of(namespace, UPKEEP).run,
                    partial(ask_for_merging, namespace.log_context),
                )
                context = namespace.ports
                await AutoRecovery(context, config=CONFIG, owner=name, also=also).run()
        except DLError:
            logger.exception("auto-recovery of %s begins again", name)
            await asyncio.sleep(0.5)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        name, uri, tls = sys.argv[1:]
        asyncio.run(run(name, uri, files_of(json.loads(tls))))
    except asyncio.CancelledError:
        sys.exit(0)
