"""Objects in real stores, by the library obstore: ``s3://bucket/…`` and ``file:///…``.

Credentials, region and endpoint of S3 come from the environment, by the names that AWS's own tools
use.  Calls run in threads: the library's own asynchronous ones abort the process now and then, when
it ends soon after a call (8 of 50 processes, obstore 0.12.1).
"""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dlcore.base.errors import ConfigurationError, ObjectStoreError
from dlcore.base.extras import missing_packages_explained
from dlcore.log.cold.objects import ListedObject, Objects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

    from dlcore.wire.digest import BytesLike

_REASON_MAX = 300


class StoredObjects(Objects):
    """Objects of every store that a URL names; each store has one client, made at its first use.

    Args:
        run: runs a call that waits for a store, by default in a thread.
    """

    def __init__(self, run: Callable[..., Awaitable[Any]] = asyncio.to_thread) -> None:
        self._run = run
        self._stores: dict[str, Any] = {}

    async def put_new(self, url: str, data: BytesLike) -> None:
        """Store an object, if there is none of that URL."""
        store, key = self._place(url)
        import obstore

        with _told("writing", url):
            # In one request: a store puts an object together from parts without the condition.
            await self._run(obstore.put, store, key, data, mode="create", use_multipart=False)
            if url.startswith("file:"):
                await self._run(sync_file, Path("/", key))

    async def read(self, url: str, start: int, end: int) -> BytesLike:
        """Return a part of an object."""
        store, key = self._place(url)
        import obstore

        with _told("reading", url):
            found = memoryview(await self._run(obstore.get_range, store, key, start=start, end=end))
        if len(found) != end - start:
            raise ObjectStoreError(
                f"reading {url}: {len(found)} bytes from {start} on, expected {end - start}",
                is_damaged=True,
            )
        return found

    async def list_below(self, url: str) -> AsyncGenerator[Sequence[ListedObject], None]:
        """Yield all objects below a URL."""
        store, key = self._place(url)
        import obstore

        root = url.removesuffix(key) if key else f"{url}/"
        with _told("listing", url):
            pages = obstore.list(store, key)
            while (page := await self._run(next, pages, None)) is not None:
                yield [
                    ListedObject(
                        root + each["path"],
                        each["size"],
                        int(each["last_modified"].timestamp() * 1000),
                    )
                    for each in page
                ]

    async def delete(self, url: str) -> None:
        """Delete an object; no error if it is gone."""
        store, key = self._place(url)
        import obstore

        with _told("deleting", url):
            try:
                await self._run(obstore.delete, store, key)
            except FileNotFoundError:
                return

    def _place(self, url: str) -> tuple[Any, str]:
        """Return the store of a URL, and the key there."""
        try:
            with missing_packages_explained():
                from obstore.store import from_url
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"{url}: {error}") from error
        parts = urlsplit(url)
        root = f"{parts.scheme}://{parts.netloc}/"
        if root not in self._stores:
            with _told("opening", root):
                self._stores[root] = from_url(root)
        return self._stores[root], parts.path.lstrip("/")


def read_whole(url: str) -> bytes | None:
    """Return a file of a store; None if there is none.  It waits for the store.

    Raises:
        ObjectStoreError: it cannot be read now.
    """
    store, key = place_in_store(url)
    import obstore

    with _told("reading", url):
        try:
            return bytes(obstore.get(store, key).bytes())
        except FileNotFoundError:
            return None


def place_in_store(url: str) -> tuple[Any, str]:
    """Return the store of a URL, by the variables of the environment as they are, and the key."""
    parts = urlsplit(url)
    chosen = tuple(sorted(each for each in os.environ.items() if each[0].startswith("AWS_")))
    return _store_of(f"{parts.scheme}://{parts.netloc}/", chosen), parts.path.lstrip("/")


@lru_cache(maxsize=64)
def _store_of(root: str, _: tuple[tuple[str, str], ...]) -> Any:
    from obstore.store import from_url

    return from_url(root)


def sync_file(file: Path) -> None:
    """Bring a file to disk, and its entries in all folders above, which may be new as well.

    The library leaves that to the system; a store over the network answers when it has done so.
    """
    for path in (file, *file.parents):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _told(what: str, url: str) -> Iterator[None]:
    """Raise what the library raises as `ObjectStoreError`."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        reason = str(error).partition("\n")[0][:_REASON_MAX]
        raise ObjectStoreError(
            f"{what} {url}: {type(error).__name__}: {reason}",
            is_damaged=isinstance(error, FileNotFoundError),
        ) from error
