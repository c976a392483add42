"""A Spark driver of its own, to be killed: streams one log into another and waits in a commit.

    python -m tests.spark.driver URI SOURCE TARGET FOLDER before-commit|after-commit|within-commit

It prints the process id of its JVM, and keeps its checkpoint in FOLDER.  The first commit touches
the file of the pause's name in FOLDER, before or after the transaction, and waits there to be
killed.  Within it, each commit does so when it has seen what there is and is about to change it,
and goes on when the file is gone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from dlcore.log.staging.commit import Commit
from dlspark import DistributedLogDataSource
from dlspark.stream import DlogStreamWriter
from tests.fixtures.spark import start_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

POLL_S = 0.1


class PausingWriter(DlogStreamWriter):
    """Waits in its commit, before or after the transaction, until it is killed."""

    def __init__(self, inner: DlogStreamWriter, folder: str, pause: str) -> None:
        self.__dict__.update(inner.__dict__)
        self._marker = Path(folder, pause)
        self._pause = pause

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Commit, and wait."""
        if self._pause == "within-commit":
            with patch.object(Commit, "_record_ops", self._waiting(Commit._record_ops)):
                super().commit(messages, batchId)
            return
        if self._pause == "after-commit":
            super().commit(messages, batchId)
        self._wait()
        os._exit(1)

    def _waiting(self, plan: Callable[..., Any]) -> Callable[..., Any]:
        """Return what waits when the operations of a transaction are planned for the first time."""
        waits = iter([self._wait])

        def wait_and_plan(*arguments: Any, **more: Any) -> Any:
            next(waits, lambda: None)()
            return plan(*arguments, **more)

        return wait_and_plan

    def _wait(self) -> None:
        self._marker.touch()
        parent = os.getppid()
        while self._marker.exists():
            time.sleep(POLL_S)
            if os.getppid() != parent:  # a kill of the driver leaves this process behind
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


def main(uri: str, source: str, target: str, folder: str, pause: str) -> None:
    """Run the query until the driver is killed."""
    spark = start_session(Path(folder, "spark"))
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    print(f"jvm {gateway.proc.pid}", flush=True)
    spark.dataSource.register(PausingDataSource)
    frame = spark.readStream.format("dlog").options(uri=uri, log=source)
    writer = frame.option("startingOffsets", "earliest").load().writeStream
    query = (
        writer.format("dlog_pausing")
        .options(uri=uri, log=target, folder=folder, pause=pause)
        .option("checkpointLocation", str(Path(folder, "checkpoint")))
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
