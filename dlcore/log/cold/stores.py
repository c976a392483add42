"""Objects in real stores, by the library obstore: ``s3://bucket/…`` and ``file:///…``.

Credentials, region and endpoint of S3 come from the environment, by the names that AWS's own tools
use.  A store has one client for each set of these variables; all that dlog reads and writes goes
through it, but for what the library of Delta tables does itself, which has the same limits.

The functions wait for the store, and `StoredObjects` runs them in threads: the library's own
asynchronous calls abort the process now and then, when it ends soon after one (8 of 50 processes,
obstore 0.12.1).
"""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dlcore.base.errors import ConfigurationError, ObjectStoreError
from dlcore.base.extras import missing_packages_explained
from dlcore.log.cold.objects import ListedObject, Objects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

    from dlcore.wire.frames import BytesLike

RETRIES_MAX = 10
RETRYING_S_MAX = 60
"""Requests that a store did not answer, or by a 5xx, are sent again: so often, and so long.

A request gets 30 s, and a connection 5 s.  Both are the library's own limits: options for its
connections would take the place of those in the environment, as `AWS_ALLOW_HTTP`.
"""
OPTIONS = {
    "timeout": "30 s",
    "connect_timeout": "5 s",
    "max_retries": str(RETRIES_MAX),
    "retry_timeout": f"{RETRYING_S_MAX} s",
}
"""The same limits, for the client that the library of Delta tables has of its own."""
_CLIENTS_MAX = 64
_REASON_MAX = 300
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DETAILS = re.compile(r"\n\nDebug source:|\n\[SQL: ")


class StoredObjects(Objects):
    """Objects of every store that a URL names.

    Args:
        run: runs a call that waits for a store, by default in a thread.
    """

    def __init__(self, run: Callable[..., Awaitable[Any]] = asyncio.to_thread) -> None:
        self._run = run

    async def put_new(self, url: str, data: BytesLike) -> None:
        """Store an object, if there is none of that URL."""
        await self._run(put_new, url, data)

    async def read(self, url: str, start: int, end: int) -> BytesLike:
        """Return a part of an object."""
        found: BytesLike = await self._run(read_part, url, start, end)
        return found

    async def list_below(self, url: str) -> AsyncGenerator[Sequence[ListedObject], None]:
        """Yield all objects below a URL."""
        pages = _pages_below(url)
        while (page := await self._run(next, pages, None)) is not None:
            yield page

    async def delete(self, url: str) -> None:
        """Delete an object; no error if it is gone."""
        await self._run(delete, url)


def put_new(url: str, data: BytesLike) -> None:
    """Store an object, if there is none of that URL; one in a folder is on disk then.

    Raises:
        ObjectStoreError: there is one, or it is unknown whether it was stored.
    """
    with store_errors("writing", url):
        library, store, key = _place(url)
        # In one request: a store puts an object together from parts without the condition.
        library.put(store, key, data, mode="create", use_multipart=False)
        if url.startswith("file:"):
            sync_file(Path("/", key))


def read_part(url: str, start: int, end: int) -> BytesLike:
    """Return the bytes [start, end) of an object.

    Raises:
        ObjectStoreError: it is not there, or shorter, or cannot be read now.
    """
    with store_errors("reading", url):
        library, store, key = _place(url)
        found = memoryview(library.get_range(store, key, start=start, end=end))
    if len(found) != end - start:
        raise ObjectStoreError(
            f"reading {url}: {len(found)} bytes from {start} on, expected {end - start}",
            is_damaged=True,
        )
    return found


def read_whole(url: str) -> bytes | None:
    """Return an object; None if there is none.

    Raises:
        ObjectStoreError: it cannot be read now.
    """
    with store_errors("reading", url):
        library, store, key = _place(url)
        try:
            return bytes(library.get(store, key).bytes())
        except FileNotFoundError:
            return None


def size_of(url: str) -> int | None:
    """Return how many bytes an object has; None if there is none.

    Raises:
        ObjectStoreError: the store does not answer now.
    """
    with store_errors("looking at", url):
        library, store, key = _place(url)
        try:
            return int(library.head(store, key)["size"])
        except FileNotFoundError:
            return None


def delete(url: str) -> None:
    """Delete an object; no error if it is gone.

    Raises:
        ObjectStoreError: it is unknown whether it is gone.
    """
    with store_errors("deleting", url):
        library, store, key = _place(url)
        try:
            library.delete(store, key)
        except FileNotFoundError:
            return


def _pages_below(url: str) -> Iterator[Sequence[ListedObject]]:
    with store_errors("listing", url):
        library, store, key = _place(url)
        root = url.removesuffix(key) if key else f"{url}/"
        for page in library.list(store, key):
            yield [
                ListedObject(
                    root + each["path"],
                    each["size"],
                    int(each["last_modified"].timestamp() * 1000),
                )
                for each in page
            ]


def _place(url: str) -> tuple[Any, Any, str]:
    """Return the library, the store of a URL, and the key there.

    Raises:
        ConfigurationError: the library is not installed.
    """
    try:
        with missing_packages_explained():
            import obstore
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{url}: {error}") from error
    parts = urlsplit(url)
    chosen = tuple(sorted(each for each in os.environ.items() if each[0].startswith("AWS_")))
    store = _store_of(f"{parts.scheme}://{parts.netloc}/", chosen)
    return obstore, store, parts.path.lstrip("/")


@lru_cache(maxsize=_CLIENTS_MAX)
def _store_of(root: str, _: tuple[tuple[str, str], ...]) -> Any:
    """Return the client of a store by the variables of the environment, which are these."""
    from obstore.store import from_url

    patience = timedelta(seconds=RETRYING_S_MAX)
    store: Any = from_url(
        root, retry_config={"max_retries": RETRIES_MAX, "retry_timeout": patience}
    )
    return store


def sync_file(file: Path) -> None:
    """Bring a file to disk, and its entries in all folders above, which may be new as well.

    The library leaves that to the system; a store over the network answers when it has done so.
    A folder that this user may not read was made by another one: neither it nor those above it
    are new.
    """
    for path in (file, *file.parents):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except PermissionError:
            if path == file:
                raise
            return
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def store_errors(what: str, url: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise what libraries raise as `ObjectStoreError`: obstore, the system, and these kinds.

    The message has the beginning of theirs in one line, without colours, statements of SQL and
    what is for debugging.
    """
    known: tuple[type[Exception], ...] = (OSError, *_of_library(), *kinds)
    try:
        yield
    except known as error:
        text = _DETAILS.split(_COLOURS.sub("", str(error)), maxsplit=1)[0]
        reason = " ".join(text.split())[:_REASON_MAX]
        raise ObjectStoreError(
            f"{what} {url}: {type(error).__name__}: {reason}",
            is_damaged=isinstance(error, FileNotFoundError),
        ) from error


def _of_library() -> tuple[type[Exception], ...]:
    try:
        from obstore.exceptions import BaseError
    except ModuleNotFoundError:
        return ()
    return (BaseError,)
