"""Exports of metadata as objects beside cold segments, so that one place brings a namespace back.

An export is an object ``<url>/metadata/<cluster id>/<time>-<moment>.dlog``, with a name that was
never used before.  The keys that sign capabilities are not in it: a reader of the store may read
records, but should not be able to sign.  A namespace without keys makes new ones.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from typing import TYPE_CHECKING

from dlcore.base.background import all_of
from dlcore.base.errors import ConfigurationError, CorruptMetadataError
from dlcore.ledger.metadata.values import LedgerMetadata
from dlcore.log.metadata.values import StoredSettings
from dlcore.metadata.paths import NamespacePaths, unescape
from dlcore.metadata.stored import decode
from dlcore.ops.backup.adopting import NAME, FoundObject
from dlcore.ops.backup.archive import Export, packed, unpacked
from dlcore.ops.backup.timetable import FOLDER, ExportName, name_of, outdated

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dlcore.log.cold.objects import Objects
    from dlcore.log.cold.reading import ColdLedgers

_TIERS = f"{NamespacePaths('').tiers}/"
_SETTINGS = re.compile(r"/heads/[^/]+/[^/]+/settings")
_AT_ONCE = 16
_KEYS = NamespacePaths("").capability_keys
_LEDGER = re.compile(r"/ledgers/\d+/\d+/\d+")


def is_url(place: str) -> bool:
    """Return whether a place is a URL of a store, and no file."""
    return "://" in place


async def put_export(objects: Objects, url: str, export: Export) -> str:
    """Store an export below a URL; return the URL that it has.

    It is one object, which is there as a whole or not at all.

    Raises: ObjectStoreError.
    """
    header = export.header
    nodes = {path: value for path, value in export.nodes.items() if path != _KEYS}
    name = ExportName(header.exported_ms, header.moment, header.cluster_id, url.rstrip("/"))
    # In a thread: the nodes of a large namespace take seconds to compress.
    data = await asyncio.to_thread(packed, Export(header, nodes))
    await objects.put_new(name.url, data)
    return name.url


async def drop_old_exports(objects: Objects, made: ExportName, *, keep: int) -> int:
    """Delete the exports beside one that was just made, but the newest; return how many.

    Raises: ObjectStoreError.
    """
    old = outdated((await _listed(objects, made.place)).keys(), made, keep=keep)
    for each in old:
        await objects.delete(each.url)
    return len(old)


async def chosen_export(objects: Objects, url: str, *, cluster_id: str | None = None) -> Export:
    """Return the export at a URL, or the newest one below it.

    Raises:
        ConfigurationError: there is none, or there are some of several clusters.
        CorruptMetadataError: it is damaged.
        ObjectStoreError: the store did not answer.
    """
    named = name_of(url)
    place = (url if named is None else named.place).rstrip("/")
    listed = await _listed(objects, place)
    if named is not None and named not in listed:
        newest = max(listed, default=None)
        rule = "there is none beside it" if newest is None else f"expected one such as {newest.url}"
        raise ConfigurationError(f"there is no export {url}: {rule}")
    chosen = named or _newest(listed, place, cluster_id)
    data = await objects.read(chosen.url, 0, listed[chosen])
    try:
        return await asyncio.to_thread(unpacked, bytes(data), source=chosen.url)
    except CorruptMetadataError as error:
        older = [each for each in listed if each.cluster_id == chosen.cluster_id and each < chosen]
        if not older:
            raise
        raise CorruptMetadataError(f"{error}; the one before it is {max(older).url}") from error


def _newest(listed: Collection[ExportName], place: str, cluster_id: str | None) -> ExportName:
    found = [each for each in listed if cluster_id in (None, each.cluster_id)]
    folder = f"{place}/{FOLDER}"
    if not found:
        whose = "" if cluster_id is None else f" of cluster {cluster_id}"
        raise ConfigurationError(
            f"there is no export{whose} below {folder}: expected one that the setting "
            f"autorecovery.export={place} or `dlog metadata export {place}` made"
        )
    clusters = sorted({each.cluster_id for each in found})
    if len(clusters) > 1:
        raise ConfigurationError(
            f"below {folder} are exports of {len(clusters)} clusters, {', '.join(clusters)}: "
            "choose one by --cluster"
        )
    return max(found)


async def _listed(objects: Objects, place: str) -> dict[ExportName, int]:
    """Return the exports below a URL, with their sizes."""
    found: dict[ExportName, int] = {}
    async with aclosing(objects.list_below(f"{place}/{FOLDER}")) as pages:
        async for page in pages:
            for each in page:
                name = name_of(each.url)
                if name is not None and name.place == place:
                    found[name] = each.size_bytes
    return found


async def listed_objects(objects: Objects, export: Export) -> dict[str, int]:
    """Return all objects of the cluster's logs, below all tiers that the export knows, with sizes.

    A tier is known if objects went there, or if a log has it.

    Raises: ObjectStoreError.
    """
    tiers: set[str] = set()
    for path, value in export.nodes.items():
        if path.startswith(_TIERS):
            tiers.add(unescape(path.removeprefix(_TIERS)))
        elif _SETTINGS.fullmatch(path):
            settings = decode(StoredSettings, value, source=path).settings
            tiers |= set() if settings.tier_url is None else {settings.tier_url}
    found: dict[str, int] = {}
    for tier in sorted(tiers):
        pages = objects.list_below(f"{tier}/{export.header.cluster_id}")
        async with aclosing(pages):
            async for page in pages:
                found |= {each.url: each.size_bytes for each in page}
    return found


def named_objects(export: Export) -> dict[str, int]:
    """Return the objects that ledgers of an export name, with sizes."""
    named: dict[str, int] = {}
    for path, value in export.nodes.items():
        if _LEDGER.fullmatch(path):
            ledger = decode(LedgerMetadata, value, source=path)
            named |= {f"{ledger.folder}/{o.name}": o.size_bytes for o in ledger.objects}
    return named


def missing_objects(export: Export, listed: Mapping[str, int]) -> list[str]:
    """Return the objects that an export names and that are not there, or not whole."""
    named = named_objects(export)
    return sorted(url for url, size_bytes in named.items() if listed.get(url) != size_bytes)


def without_objects(export: Export, urls: Collection[str]) -> Export:
    """Return an export without the ledgers that name some objects, whose records are lost then."""
    lost = frozenset(urls)

    def is_whole(path: str, value: bytes) -> bool:
        if not _LEDGER.fullmatch(path):
            return True
        ledger = decode(LedgerMetadata, value, source=path)
        return lost.isdisjoint(f"{ledger.folder}/{each.name}" for each in ledger.objects)

    kept = {path: value for path, value in export.nodes.items() if is_whole(path, value)}
    return Export(export.header, kept)


async def unnamed_objects(
    cold: ColdLedgers, export: Export, listed: Mapping[str, int]
) -> list[FoundObject]:
    """Return the objects that an export does not name, with what they say of themselves.

    Raises: ObjectStoreError: one is damaged, or the store did not answer.
    """
    named = named_objects(export)
    urls = [
        url
        for url in listed
        if url not in named and NAME.fullmatch(url.rpartition("/")[2]) is not None
    ]

    async def look(url: str) -> FoundObject:
        layout = await cold.layout_of(url, listed[url])
        return FoundObject(url, listed[url], layout.facts, layout.last_timestamp_ms)

    found: list[FoundObject] = []
    for start in range(0, len(urls), _AT_ONCE):
        found += await all_of(*(look(url) for url in urls[start : start + _AT_ONCE]))
    return found
