#!/usr/bin/env bash
# spark-submit reads this file beside spark-defaults.conf.

# The Python that has dlog installed, at the same place on every host: the driver, the processes that
# Spark starts beside it, and the workers of executors run it; without it the python3 of the PATH. The
# setting spark.pyspark.python does not do: Spark looks sources up with what this variable names.
export PYSPARK_PYTHON=/opt/dlog/bin/python
