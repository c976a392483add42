"""Spark's interface for read limits and Trigger.AvailableNow, as far as its version has one.

PySpark 4.1 has neither.  It asks for the latest offset without a limit, and makes one batch of
`Trigger.AvailableNow` and `Trigger.Once`, which limits leave incomplete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyspark

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

    from dlspark.limits import Limits
else:
    try:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
    except ImportError:  # PySpark 4.1

        class SupportsTriggerAvailableNow:
            """Replaces the class that this version of Spark does not have."""


__all__ = [
    "ADVICE_WITHOUT_ADMISSION",
    "ADVICE_WITHOUT_LAG",
    "SupportsTriggerAvailableNow",
    "default_read_limit",
    "has_admission_control",
    "is_unlimited",
]

_VERSION = f"PySpark {pyspark.__version__}"
ADVICE_WITHOUT_ADMISSION = (
    f"{_VERSION} makes one batch of Trigger.AvailableNow, and tells no source of Trigger.Once: "
    "with maxRecordsPerTrigger or maxBytesPerTrigger either reads one limited batch of what is "
    "available and leaves the rest to the next run; leave the limits out, or use PySpark 4.2 or "
    "later"
)
ADVICE_WITHOUT_LAG = (
    f"{_VERSION} lets no source report its latest offset, so how far a query is behind is not "
    "known: use PySpark 4.2 or later to see it"
)


def has_admission_control() -> bool:
    """Whether Spark passes limits to a stream reader, and announces Trigger.AvailableNow."""
    return hasattr(SupportsTriggerAvailableNow, "prepareForTriggerAvailableNow")


def default_read_limit(limits: Limits) -> ReadLimit:
    """Return the read limit for Spark; the reader itself applies the details."""
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
    )

    if limits.max_records is not None:
        return ReadMaxRows(limits.max_records)
    if limits.max_bytes is not None:
        return ReadMaxBytes(limits.max_bytes)
    if limits.min_records is not None:
        return ReadMinRows(limits.min_records)
    return ReadAllAvailable()


def is_unlimited(limit: Any) -> bool:
    """Whether Spark asks for all available records, as it does for Trigger.Once."""
    return type(limit).__name__ == "ReadAllAvailable"
