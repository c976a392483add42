"""A program's configuration that may change while it runs: it is read again at a signal."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def next_configuration(
    hung_up: asyncio.Event, read: Callable[[], Awaitable[T]], known: T
) -> T:
    """Return the next configuration that differs from `known`.

    Args:
        hung_up: set by SIGHUP, when the configuration may have changed.
        read: returns the current configuration; its error is logged, and nothing changes.
        known: the configuration in use.
    """
    while True:
        await hung_up.wait()
        hung_up.clear()
        try:
            found = await read()
        except ConfigurationError as error:
            logger.error("the configuration stays as it was: %s", error)  # noqa: TRY400  not ours
            continue
        logger.warning("the configuration was read again")
        if found != known:
            return found
