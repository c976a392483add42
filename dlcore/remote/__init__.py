"""A client that reads and writes logs through proxies only; it needs no bookies or ZooKeeper.

    async with await open_namespace("grpc://10.0.0.1:4190,10.0.0.2:4190") as namespace:
        log = await namespace.open_log("clicks")
        async with await log.open_reader(txid=100) as reader:
            async for record in reader.records(follow=True):
                ...
        async with await log.open_writer(producer="meter-7") as writer:
            dlsn = await writer.write(LogRecord(txid, b"hello"))

The names are those of `dlcore`; `dlcore.remote.sync` is the blocking API with the same names.  If a
proxy does not answer, the client tries the others, and this one again, for `patience_s`.  A reader
goes on where it was and returns each record once.  Each record that a writer accepts is in the log
once.
"""

from __future__ import annotations

from dlcore.remote.log import RemoteLog, RemoteRange
from dlcore.remote.namespace import RemoteNamespace, open_namespace
from dlcore.remote.reader import RemoteReader, RemoteRecord
from dlcore.remote.writing import RemoteWriter

__all__ = [
    "RemoteLog",
    "RemoteNamespace",
    "RemoteRange",
    "RemoteReader",
    "RemoteRecord",
    "RemoteWriter",
    "open_namespace",
]
