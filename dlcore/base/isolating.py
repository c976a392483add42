"""Isolation of failures in a sweep: it reports the failure and continues with the next item.

A sweep over logs, ledgers or bookies serves all of them.  Therefore neither damaged metadata of one
item, nor a defect that it reveals, may end the sweep or its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from dlcore.base.errors import (
    AlreadyClosedError,
    DLError,
    MetadataConnectionError,
    MetadataSessionExpiredError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

TROUBLES_MAX = 20
_OF_ALL = (AlreadyClosedError, MetadataConnectionError, MetadataSessionExpiredError)
"""Errors that are no fault of one item: the other items would fail in the same way."""


def report_defect(what: str, error: BaseException) -> None:
    """Report an error that only a defect of the program explains, as the event loop does."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": f"{what}: a defect of the program", "exception": error}
    )


class Troubles:
    """The items that one sweep could not handle, and why."""

    def __init__(self) -> None:
        self.count = 0
        self.found: list[str] = []
        """The first ones, at most `TROUBLES_MAX`."""

    @contextlib.contextmanager
    def isolated(
        self, what: str, failed: Callable[[Exception], None] = lambda _: None
    ) -> Iterator[None]:
        """Report failures in this context, also to `failed`, and continue after it.

        Raises:
            MetadataConnectionError, MetadataSessionExpiredError: the metadata store does not
                answer.
            AlreadyClosedError: the process ends.
        """
        try:
            yield
        except _OF_ALL:
            raise
        except DLError as error:
            kind = type(error).__name__
            if "to do: " in str(error).lower():
                logger.warning("%s: %s: %s; to do: as the error says", what, kind, error)
            else:
                logger.warning(
                    "%s: %s: %s; to do: nothing now, the rest goes on; see to the reason if it "
                    "comes again",
                    what,
                    kind,
                    error,
                )
            self.note(what, error)
            failed(error)
        except Exception as error:  # noqa: BLE001  # reported with its traceback
            report_defect(what, error)
            self.note(what, error)
            failed(error)

    def note(self, what: str, error: Exception) -> None:
        """Count a failure, and keep it if it is among the first."""
        self.count += 1
        if len(self.found) < TROUBLES_MAX:
            self.found.append(f"{what}: {type(error).__name__}: {error}")
