"""A Spark driver of its own, to be killed: streams one log into another until told to stop.

    python -m tests.spark.driver URI SOURCE TARGET FOLDER [pause-after-commit | pause-before-commit]

It prints the process id of its JVM, and keeps its checkpoint in FOLDER.  With a pause, the first
commit touches FOLDER/paused at that point and waits there to be killed.  It stops by itself, with
exit code 0, once FOLDER/stop exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dlspark import DistributedLogDataSource
from dlspark.stream import DlogStreamWriter
from tests.fixtures.spark import start_session

if TYPE_CHECKING:
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

POLL_S = 0.1


class PausingWriter(DlogStreamWriter):
    """Waits in its commit, before or after the transaction, until it is killed."""

    def __init__(self, inner: DlogStreamWriter, folder: str, pause: str) -> None:
        self.__dict__.update(inner.__dict__)
        self._marker = Path(folder, "paused")
        self._pause = pause

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Commit, and wait."""
        if self._pause == "pause-after-commit":
            super().commit(messages, batchId)
        self._marker.touch()
        parent = os.getppid()
        while os.getppid() == parent:  # whoever kills the driver leaves this process behind
            time.sleep(POLL_S)
        os._exit(1)


class PausingDataSource(DistributedLogDataSource):
    """The source with a writer that waits."""

    @classmethod
    def name(cls) -> str:
        """Return a name of its own."""
        return "dlog_pausing"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DlogStreamWriter:
        """Return the waiting writer; its options are not dlog's."""
        folder, pause = self.options["folder"], self.options["pause"]
        own = {key: value for key, value in self.options.items() if key not in ("folder", "pause")}
        return PausingWriter(
            DistributedLogDataSource(own).streamWriter(schema, overwrite), folder, pause
        )


def main(uri: str, source: str, target: str, folder: str, pause: str = "") -> None:
    """Run the query until it is to stop."""
    spark = start_session(Path(folder, "spark"))
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    print(f"jvm {gateway.proc.pid}", flush=True)
    spark.dataSource.register(PausingDataSource)
    frame = spark.readStream.format("dlog").options(uri=uri, log=source)
    writer = frame.option("startingOffsets", "earliest").load().writeStream
    if pause:
        writer = writer.format("dlog_pausing").options(folder=folder, pause=pause)
    else:
        writer = writer.format("dlog")
    query = writer.options(
        uri=uri, log=target, checkpointLocation=str(Path(folder, "checkpoint"))
    ).start()
    while query.isActive and not Path(folder, "stop").exists():
        time.sleep(POLL_S)
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
