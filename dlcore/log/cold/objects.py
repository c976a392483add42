"""The port to object stores.

An object is written once, under a URL that was never used before, and never changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.wire.frames import BytesLike


class ListedObject(NamedTuple):
    """An object that a list names; `modified_ms` is the store's own time."""

    url: str
    size_bytes: int
    modified_ms: int


class Objects(Protocol):
    """Objects in any stores, by their URLs.  Every method may raise `ObjectStoreError`."""

    async def put_new(self, url: str, data: BytesLike) -> None:
        """Store an object.

        Raises:
            ObjectStoreError: there is one of that URL, or it is unknown whether it was stored.
        """
        ...

    async def read(self, url: str, start: int, end: int) -> BytesLike:
        """Return the bytes [start, end) of an object."""
        ...

    def list_below(self, url: str) -> AsyncGenerator[Sequence[ListedObject], None]:
        """Yield all objects below a URL, many at a time, in no order."""
        ...

    async def delete(self, url: str) -> None:
        """Delete an object; no error if it is gone."""
        ...


async def delete_below(objects: Objects, url: str) -> None:
    """Delete all objects below a URL."""
    found = [each.url async for page in objects.list_below(url) for each in page]
    for each in found:
        await objects.delete(each)
