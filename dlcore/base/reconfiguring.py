"""A program's configuration that may change while it runs: it is read again at a signal."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping

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
            logger.error(  # noqa: TRY400  not ours
                "the configuration stays as it was: %s; to do: correct the setting, and send "
                "SIGHUP again",
                error,
            )
            continue
        logger.warning("the configuration was read again; to do: nothing")
        if found != known:
            return found
        logger.debug("the configuration is the same as before")


def tell_left(left: Mapping[str, object], kept: Mapping[str, object]) -> None:
    """Log the settings that a running program does not take over, and what it keeps of them."""
    for key, value in left.items():
        logger.warning(
            "%s=%s takes effect after a restart, until then %s; to do: restart the process when "
            "it suits",
            key,
            value,
            kept[key],
        )
