"""One of many that fails keeps no other from its turn: a sweep goes on, and what failed is told.

A sweep over logs, ledgers or bookies serves all of them, so nothing that is stored of one of them,
and no defect that it brings to light, may end the sweep or its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from dlcore.errors import (
    AlreadyClosedError,
    DLError,
    MetadataConnectionError,
    MetadataSessionExpiredError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

TROUBLES_MAX = 20
_OF_ALL = (AlreadyClosedError, MetadataConnectionError, MetadataSessionExpiredError)
"""No fault of one of them: the others would fail likewise."""


def report_defect(what: str, error: BaseException) -> None:
    """Tell of an error that only a defect of the program explains, as the event loop tells them."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": f"{what}: a defect of the program", "exception": error}
    )


class Troubles:
    """What one sweep could not do, and why."""

    def __init__(self) -> None:
        self.count = 0
        self.found: list[str] = []
        """The first ones, `TROUBLES_MAX` at most."""

    @contextlib.contextmanager
    def isolated(self, what: str) -> Iterator[None]:
        """Tell of what fails in this context, and go on after it.

        Raises:
            MetadataConnectionError, MetadataSessionExpiredError: the metadata store is away.
            AlreadyClosedError: the process ends.
        """
        try:
            yield
        except _OF_ALL:
            raise
        except DLError as error:
            logger.warning("%s: %s: %s", what, type(error).__name__, error)
            self.note(what, error)
        except Exception as error:  # noqa: BLE001  # told, with its traceback
            report_defect(what, error)
            self.note(what, error)

    def note(self, what: str, error: Exception) -> None:
        """Count what failed, and keep it if it is among the first."""
        self.count += 1
        if len(self.found) < TROUBLES_MAX:
            self.found.append(f"{what}: {type(error).__name__}: {error}")
