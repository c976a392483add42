"""The text of an error, taken while Spark runs: a Java error keeps its text in Spark's process."""

from __future__ import annotations

import traceback
from typing import NamedTuple

from py4j.protocol import Py4JJavaError


class Failure(NamedTuple):
    """The text of an error."""

    trace: str
    cause: str
    """Its chain without stacks: what failed, and because of which errors."""


def describe_failure(error: BaseException) -> Failure:
    """Describe `error` while Spark still runs: an error of Java keeps its text over there."""
    trace = "".join(traceback.format_exception(error))
    if not isinstance(error, Py4JJavaError):
        return Failure(trace, "".join(traceback.format_exception_only(error)).strip())
    behind, chain = error.java_exception, []
    while behind is not None:
        chain.append(str(behind.toString()).strip())
        behind = behind.getCause()
    return Failure(trace, "\nbecause of ".join(chain))
