"""The base of the blocking API's classes: an async twin, and the portal to run it on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from dlcore.sync.portal import Portal

_Result = TypeVar("_Result")


class Blocking:
    """An object with an async twin: runs coroutines on the portal, closes once, also at exit."""

    def __init__(self, portal: Portal, aclose: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._portal = portal
        self._aclose = aclose
        self._closed = False

    def _call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return self._portal.call(coroutine)

    def _call_on_loop(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in the loop's thread, to which the async objects belong."""

        async def call() -> _Result:
            return function()

        return self._call(call())

    def close(self) -> None:
        """Close it; harmless if it is closed already."""
        if self._closed:
            return
        self._closed = True
        if not self._portal.is_inherited:  # else the process that opened it closes it
            self._call(self._aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def iterate(portal: Portal, iterator: AsyncIterator[_Result]) -> Iterator[_Result]:
    """Return the items of an async iterator, each fetched when it is requested."""

    async def fetch() -> tuple[_Result, ...]:
        async for each in iterator:
            return (each,)
        return ()

    while found := portal.call(fetch()):
        yield found[0]
