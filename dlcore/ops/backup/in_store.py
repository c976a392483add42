"""Exports of metadata as objects beside cold segments, so that one place brings a namespace back.

An export is an object ``<url>/metadata/<cluster id>/<time>-<moment>.dlog``, with a name that nobody
used before.  The keys that sign capabilities are not in it: who may read the store may read
records, but should not be able to sign.  A namespace without keys makes new ones.
"""

from __future__ import annotations

import re
from contextlib import aclosing
from typing import TYPE_CHECKING

from dlcore.base.background import all_of
from dlcore.base.errors import ConfigurationError
from dlcore.ledger.metadata.values import LedgerMetadata
from dlcore.log.metadata.values import StoredSettings
from dlcore.metadata.paths import NamespacePaths, unescape
from dlcore.metadata.stored import decode
from dlcore.ops.backup.adopting import NAME, FoundObject
from dlcore.ops.backup.archive import Export, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.log.cold.objects import ListedObject, Objects
    from dlcore.log.cold.reading import ColdLedgers

_FOLDER = "metadata"
_TIERS = f"{NamespacePaths('').tiers}/"
_SETTINGS = re.compile(r"/heads/[^/]+/[^/]+/settings")
_AT_ONCE = 16
_NAME = re.compile(r"(?P<cluster>[^/]+)/(?P<time>\d{15})-(?P<moment>\d+)\.dlog")
_KEYS = NamespacePaths("").capability_keys
_LEDGER = re.compile(r"/ledgers/\d+/\d+/\d+")


def is_url(place: str) -> bool:
    """Return whether a place is a URL of a store, and no file."""
    return "://" in place


async def put_export(objects: Objects, url: str, export: Export) -> str:
    """Store an export below a URL; return the URL that it has.

    Raises: ObjectStoreError.
    """
    header = export.header
    nodes = {path: value for path, value in export.nodes.items() if path != _KEYS}
    name = f"{header.exported_ms:015d}-{header.moment}.dlog"
    at = f"{url.rstrip('/')}/{_FOLDER}/{header.cluster_id}/{name}"
    await objects.put_new(at, packed(Export(header, nodes)))
    return at


async def newest_export(objects: Objects, url: str, *, cluster_id: str | None = None) -> Export:
    """Return the newest export below a URL.

    Raises:
        ConfigurationError: there is none, or there are some of several clusters.
        CorruptMetadataError: it is damaged.
        ObjectStoreError: the store did not answer.
    """
    folder = f"{url.rstrip('/')}/{_FOLDER}"
    found: dict[str, list[tuple[int, int, ListedObject]]] = {}
    async with aclosing(objects.list_below(folder)) as pages:
        async for page in pages:
            for each in page:
                name = _NAME.fullmatch(each.url[len(folder) + 1 :])
                if name is not None and cluster_id in (None, name["cluster"]):
                    order = int(name["time"]), int(name["moment"])
                    found.setdefault(name["cluster"], []).append((*order, each))
    if not found:
        whose = "" if cluster_id is None else f" of cluster {cluster_id}"
        raise ConfigurationError(
            f"there is no export{whose} below {folder}: expected one that `dlog metadata export "
            f"{url}` made"
        )
    if len(found) > 1:
        raise ConfigurationError(
            f"below {folder} are exports of {len(found)} clusters, {', '.join(sorted(found))}: "
            "choose one by --cluster"
        )
    (exports,) = found.values()
    newest = max(exports)[-1]
    data = await objects.read(newest.url, 0, newest.size_bytes)
    return unpacked(bytes(data), source=newest.url)


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
            tiers |= set() if settings.tier is None else {settings.tier}
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
