"""Logs read through proxies alone: no way to bookies or ZooKeeper is needed.

    async with await open_namespace("grpc://10.0.0.1:4190,10.0.0.2:4190") as namespace:
        log = await namespace.open_log("clicks")
        async with log.open_reader(txid=100) as reader:
            async for record in reader.records(follow=True):
                ...

The names are those of the core; `dlcore.remote.sync` has the same ones, blocking.  A proxy that is
gone or unreachable is waited for, and the next one tried, for `patience_s`; a reader goes on where
it was, so that it returns each record once.
"""

from __future__ import annotations

from dlcore.remote.reading import (
    RemoteLog,
    RemoteNamespace,
    RemoteRange,
    RemoteReader,
    RemoteRecord,
    open_namespace,
)

__all__ = [
    "RemoteLog",
    "RemoteNamespace",
    "RemoteRange",
    "RemoteReader",
    "RemoteRecord",
    "open_namespace",
]
