"""The async counterpart of `Blocking`: a base of objects that `async with` closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class AsyncClosing(ABC):
    """An object that is closed at the end of its `async with` block."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close it; harmless if it is closed already."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
