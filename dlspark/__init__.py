"""dlog for Spark: a data source over replicated logs.

With dlog installed, ``format("dlog")`` works without any code, because Spark finds the module
`pyspark_dlog`.  `register` does the same explicitly, if Spark does not find the module.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from dlcore.base.clock import SystemClock
from dlcore.base.errors import ConfigurationError
from dlspark.commit import THREAD_PROPERTY
from dlspark.plotting import follow_progress, plot_progress
from dlspark.progress import ProgressListener
from dlspark.source import DistributedLogDataSource
from dlspark.table import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

__all__ = [
    "DistributedLogDataSource",
    "ProgressListener",
    "follow_progress",
    "in_batch",
    "plot_progress",
    "register",
    "table",
]

logger = logging.getLogger(__name__)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def register(spark: SparkSession) -> None:
    """Make ``format("dlog")`` known to a session, and the session the active one of this thread.

    Spark finds the format by itself unless the session started before dlog was installed, or the
    path of its Python contains a blank.  A thread that the program started can read logs without
    this call.  To write logs, by batch or stream, the thread itself has to make this call, because
    Spark looks up the format of a write in the thread's active session.

    A warning is logged if streams will not work because Spark ships dlog to tasks only.
    """
    jvm: Any = getattr(spark, "_jvm", None)
    shipped = Path(__file__).parents[1]
    # A package that Spark ships is in a zip or wheel, so this path is a file and no folder.
    if jvm is not None and shipped.is_file():
        inherited = (jvm.System.getenv("PYTHONPATH") or "").split(os.pathsep)
        if shipped.name not in [Path(entry).name for entry in inherited]:
            logger.warning(
                "dlog comes from %s, which Spark ships to tasks, but not to the processes that "
                "plan streams: set PYTHONPATH to it before the driver starts, or install dlog on "
                "the driver's machine; to do: either of these before streams start",
                shipped,
            )
    spark.dataSource.register(DistributedLogDataSource)
    if jvm is not None:
        jvm.SparkSession.setActiveSession(spark._jsparkSession)


def in_batch(
    function: Callable[_Arguments, _Result], session: SparkSession
) -> Callable[_Arguments, _Result]:
    """Return `function` for another thread, where it works as in the current thread.

    Call it with ``batch.sparkSession`` in a function that ``foreachBatch`` calls.  Threads can then
    write parts of the micro-batch at the same time, to different logs.  Writes to one log need an
    order, and concurrent calls have none.  A thread without this has no active session, and
    therefore no ``format("dlog")``.  It also does not know the micro-batch, so its writes would not
    be exactly-once.

    Raises:
        ConfigurationError: the session is one of Spark Connect. There, give each write within a
            micro-batch its own ``txnAppId``, and the batch id as ``txnVersion``; then threads need
            nothing else.
    """
    jvm: Any = getattr(session, "_jvm", None)
    if jvm is None:
        raise ConfigurationError(
            "in_batch is for classic sessions. Over Spark Connect call the function itself, in any "
            "thread, and give each write a txnAppId of its own and the batch id as txnVersion"
        )
    clock, context = SystemClock(), session.sparkContext._jsc.sc()
    properties = context.getLocalProperties().clone()

    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        before = context.getLocalProperties()
        context.setLocalProperties(properties.clone())  # Spark changes them while it executes
        context.setLocalProperty(THREAD_PROPERTY, clock.new_token())
        jvm.SparkSession.setActiveSession(session._jsparkSession)
        try:
            return function(*args, **kwargs)
        finally:
            jvm.SparkSession.clearActiveSession()
            context.setLocalProperties(before)  # the thread may outlive the batch

    return run
