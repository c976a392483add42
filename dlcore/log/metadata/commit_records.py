"""The records of commits: what each appender committed last."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.background import together
from dlcore.base.errors import MetadataVersionError, NoNodeError
from dlcore.log.metadata.commits import CommitStatus
from dlcore.log.metadata.values import CommitRecord
from dlcore.metadata.one_node import persistently
from dlcore.metadata.paths import BUCKETS, unescape
from dlcore.metadata.stored import decode, decode_or_tell

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore

logger = logging.getLogger(__name__)

_RECORDS_AT_ONCE = 50
"""Each may have the digests of 2,000 logs, which are 11 KB: this many are half a megabyte."""
_BUCKETS_AT_ONCE = 16


async def sweep_commits(store: MetadataStore, paths: NamespacePaths, *, before_ms: int) -> int:
    """Delete the records of commits made before a time; return how many."""
    count = 0
    async for path, version, record in commit_records(store, paths):
        if record.committed_ms < before_ms:
            # It changed, so it is not old, or another sweep deleted it.
            with contextlib.suppress(MetadataVersionError, NoNodeError):
                await store.delete(path, version=version)
                count += 1
    return count


async def commit_records(
    store: MetadataStore, paths: NamespacePaths
) -> AsyncGenerator[tuple[str, int, CommitRecord], None]:
    """Yield the path, the version and the value of every commit record, some at a time.

    A damaged record is logged and left out: its appender gets the error at its next commit.
    """

    tell = partial(logger.warning, "a record of commits is left out: %s")

    async def paths_below(bucket: str) -> list[str]:
        parent = f"{paths.commits}/{bucket}"
        names = await persistently(lambda: store.get_children(parent))
        return [f"{parent}/{name}" for name in names or ()]

    for first in range(0, len(BUCKETS), _BUCKETS_AT_ONCE):
        buckets = BUCKETS[first : first + _BUCKETS_AT_ONCE]
        lists = await together(*map(paths_below, buckets))
        found = [path for each in lists for path in each]
        for start in range(0, len(found), _RECORDS_AT_ONCE):
            some = found[start : start + _RECORDS_AT_ONCE]
            nodes = await persistently(lambda some=some: store.get_many(some))  # type: ignore[misc]
            for path, node in zip(some, nodes, strict=True):
                record = decode_or_tell(CommitRecord, node, source=path, tell=tell)
                if node is not None and record is not None:
                    yield path, node.version, record


async def list_commits(store: MetadataStore, paths: NamespacePaths) -> list[CommitStatus]:
    """Return the last commit of each appender that has a record, in no order."""
    return [
        CommitStatus(
            identity=unescape(path.rpartition("/")[2]),
            version=record.version,
            appends=record.committed,
            committed_ms=record.committed_ms,
        )
        async for path, _, record in commit_records(store, paths)
    ]


async def last_version(store: MetadataStore, paths: NamespacePaths, identity: str) -> int:
    """Return the last version that an appender committed, -1 if none is known."""
    path = paths.commit(identity)
    node = await persistently(lambda: store.get(path, fresh=True))
    return -1 if node is None else decode(CommitRecord, node.value, source=path).version
