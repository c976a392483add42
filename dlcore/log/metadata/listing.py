"""Lists the names of logs bucket by bucket, so that no answer grows with the namespace."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.background import together
from dlcore.base.config import require
from dlcore.log.metadata.values import LogMetadata
from dlcore.metadata.one_node import persistently
from dlcore.metadata.paths import BUCKETS, bucket_of, name_of_component
from dlcore.metadata.stored import decode_or_tell

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore, Versioned

logger = logging.getLogger(__name__)

PAGE_SIZE = 1000
_BUCKETS_AT_ONCE = 32
_VALUES_AT_ONCE = 500
"""Values read in one request: with names of 512 bytes half a megabyte."""


async def list_pages(
    store: MetadataStore,
    paths: NamespacePaths,
    prefix: str,
    *,
    after: str | None,
    page_size: int,
) -> AsyncGenerator[list[str], None]:
    """Yield the names that start with `prefix`, up to `page_size` at a time, in `place_of` order.

    `after` is the last name of a page, perhaps of an earlier listing: later names are yielded.
    """
    require(condition=page_size >= 1, key="page_size", value=page_size, rule="expected 1 or more")
    await persistently(lambda: store.sync(paths.logs))
    page: list[str] = []
    start = 0 if after is None else BUCKETS.index(bucket_of(after))
    for at in range(start, len(BUCKETS), _BUCKETS_AT_ONCE):
        buckets = BUCKETS[at : at + _BUCKETS_AT_ONCE]
        for names in await together(*(_list_bucket(store, paths, each) for each in buckets)):
            page += [
                name
                for name in names
                if name.startswith(prefix)
                if after is None or place_of(name) > place_of(after)
            ]
            while len(page) >= page_size:
                yield page[:page_size]
                page = page[page_size:]
    if page:
        yield page


async def list_logs(
    store: MetadataStore, paths: NamespacePaths
) -> AsyncGenerator[list[LogMetadata], None]:
    """Yield the logs of each of `BUCKETS` in turn; a log with a damaged name is left out."""
    await persistently(lambda: store.sync(paths.logs))
    for bucket in BUCKETS:
        path = paths.log_bucket(bucket)
        children = await persistently(partial(store.get_children, path)) or []
        yield await read_names(store, [f"{path}/{child}" for child in children])


def place_of(name: str) -> tuple[str, str]:
    """Return the sort key of a name in a listing: its bucket, then the name."""
    return bucket_of(name), name


async def _list_bucket(store: MetadataStore, paths: NamespacePaths, bucket: str) -> list[str]:
    path = paths.log_bucket(bucket)
    components = await persistently(lambda: store.get_children(path)) or []
    known = {component: name_of_component(component) for component in components}
    long = [f"{path}/{component}" for component, name in known.items() if name is None]
    nodes = await read_names(store, long)
    return sorted([*(name for name in known.values() if name), *(log.name for log in nodes)])


async def read_names(store: MetadataStore, paths: Sequence[str]) -> list[LogMetadata]:
    """Return the values of these nodes of names, without those that are gone.

    A damaged node is logged and left out: its name is unknown.
    """
    found: list[LogMetadata] = []
    tell = partial(logger.warning, "a log is not listed: %s")
    for at in range(0, len(paths), _VALUES_AT_ONCE):
        part = paths[at : at + _VALUES_AT_ONCE]
        nodes: list[Versioned | None] = await persistently(partial(store.get_many, part))
        logs = (
            decode_or_tell(LogMetadata, node, source=path, tell=tell)
            for path, node in zip(part, nodes, strict=True)
        )
        found += filter(None, logs)
    return found
