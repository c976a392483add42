"""Errors of requests that only a defect explains, in the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dlcore.base.errors import DLError

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)


def reported(error: BaseException | None) -> BaseException | None:
    """Return the error of a request, which its client gets; log it if a defect has caused it."""
    if error is not None and not isinstance(error, DLError):
        logger.error(
            "a request failed unexpectedly; to do: report this as a defect; the client asks "
            "another bookie",
            exc_info=error,
        )
    return error


def error_of(task: asyncio.Task[None]) -> BaseException | None:
    """Return the error of a request's task, reported; None if it has none, or was cancelled."""
    return None if task.cancelled() else reported(task.exception())
