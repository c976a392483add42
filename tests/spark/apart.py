"""Spark on a machine that reaches one proxy and nothing else: batches, a stream, and its sink.

    unshare … python -m tests.spark.apart SOCKET PORT HOME FOLDER ADDRESS …

SOCKET is the file by which the proxy is reached, whose port is PORT; the addresses are those of
bookies and ZooKeeper, which cannot be.  It reads the log HOME/a, streams it to HOME/copy, writes
HOME/new, and prints the transaction ids that it read, as JSON.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.fixtures.relay import connect_to, relay
from tests.fixtures.spark import start_session

_TIMEOUT_S = 5.0


def main(path: str, port: str, home: str, folder: str, *others: str) -> None:
    """Do it all, through the proxy."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for address in others:
        host, _, other = address.rpartition(":")
        try:
            socket.create_connection((host, int(other)), _TIMEOUT_S).close()
        except OSError:
            continue
        raise SystemExit(f"{address} can be reached from here")
    relay(socket.create_server(("127.0.0.1", int(port))), partial(connect_to, Path(path)))
    endpoint = f"grpc://127.0.0.1:{port}"
    spark = start_session(Path(folder))
    reading = spark.read.format("dlog").option("endpoint", endpoint).option("log", f"{home}/a")
    found = reading.option("minPartitions", "2").load()
    txids = sorted(row.txid for row in found.select("txid").collect())
    live = spark.readStream.format("dlog").option("endpoint", endpoint)
    live = live.option("log", f"{home}/a").option("startingOffsets", "earliest")
    sink = live.load().select("value", "txid").writeStream.format("dlog")
    sink = sink.option("endpoint", endpoint).option("log", f"{home}/copy")
    sink = sink.option("checkpointLocation", str(Path(folder, "checkpoint")))
    sink.trigger(availableNow=True).start().awaitTermination()
    rows = spark.createDataFrame([(f"{number}",) for number in range(10)], "value string")
    saving = rows.write.format("dlog").option("endpoint", endpoint).option("log", f"{home}/new")
    saving.option("createLog", "true").mode("append").save()
    spark.stop()
    print(json.dumps(txids), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
