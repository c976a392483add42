"""A program whose configuration may change while it runs: it reads it again when told to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from dlcore.errors import ConfigurationError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def next_configuration(
    hung_up: asyncio.Event, read: Callable[[], Awaitable[T]], known: T
) -> T:
    """Return the next configuration that is another one than `known`.

    Args:
        hung_up: is set, by SIGHUP, when it may have changed.
        read: returns it as it is now; what it refuses is logged, and changes nothing.
        known: what the program goes by.
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
