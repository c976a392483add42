"""A job of Spark with secrets: ``python -m tests.spark.secret_job FOLDER OPTIONS…``.

It keeps its event logs, checkpoints and temporary files in FOLDER.  Each of OPTIONS is a JSON
object: how to reach two logs, which it writes, copies from one to the other by a stream, and reads.
Then it prints its plans, and waits until its standard input ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.fixtures.spark import start_session
from tests.spark.test_tls import require_copied


def main(folder: Path, *jobs: str) -> None:
    """Do all that is asked for."""
    events = folder / "events"
    events.mkdir()
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",  # else a secret in it is not found
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.logBlockUpdates.enabled": "true",
    }
    spark = start_session(folder / "spark", options=settings)
    for number, job in enumerate(jobs):
        options = json.loads(job)
        require_copied(spark, options, folder / f"checkpoint-{number}", home=f"{number}/")
        frame = spark.read.format("dlog").options(**options, log=f"{number}/copy").load()
        frame.explain(extended=True)
        print(frame, options.keys(), flush=True)
    print("done", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
