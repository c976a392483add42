"""The async counterpart of `Blocking`: what closes itself at the end of an `async with`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class AsyncClosing(ABC):
    """Something that is closed when the `async with` block which it is used in ends."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close it; harmless when it is closed."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
