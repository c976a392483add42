"""The time of the next export of metadata, and the old exports that go; pure.

The driver is `dlcore/ops/upkeep/exporter.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlcore.ops.autorecovery.values import LastExport

FOLDER = "metadata"
"""The folder of exports, below the URL of a store."""
_NAME = re.compile(
    rf"(?P<place>.+)/{FOLDER}/(?P<cluster>[^/]+)/(?P<time>\d{{15}})-(?P<moment>\d+)\.dlog"
)


class ExportName(NamedTuple):
    """The URL of an export, in parts; names of one cluster are in the order of time."""

    exported_ms: int
    moment: int
    cluster_id: str
    place: str
    """The URL below which it is."""

    @property
    def url(self) -> str:
        """Return it as a whole."""
        return f"{self.place}/{FOLDER}/{self.cluster_id}/{self.exported_ms:015d}-{self.moment}.dlog"


def name_of(url: str) -> ExportName | None:
    """Return the parts of the URL of an export; None: it is another URL."""
    found = _NAME.fullmatch(url)
    if found is None:
        return None
    return ExportName(int(found["time"]), int(found["moment"]), found["cluster"], found["place"])


def age_ms_of(last: LastExport | None, place: str, now_ms: int) -> int | None:
    """Return the age of the last export below a URL; None: there was none yet."""
    name = None if last is None else name_of(last.url)
    if last is None or name is None or name.place != place:
        return None
    return now_ms - last.exported_ms


def is_due(age_ms: int | None, *, every_s: float) -> bool:
    """Return whether an export is due now.

    Clocks of hosts differ, so that the last one may be a little ahead of the present.  If it is far
    ahead, a clock went back, and to wait for it would be to wait for as long.
    """
    return age_ms is None or abs(age_ms) >= every_s * 1000


def outdated(found: Collection[ExportName], made: ExportName, *, keep: int) -> list[ExportName]:
    """Return those exports of the cluster of `made` that go, because there are `keep` newer ones.

    The one that was just made stays, also if a clock went back and others look newer.
    """
    others = sorted(each for each in found if each.cluster_id == made.cluster_id and each != made)
    return others[: max(0, len(others) - keep + 1)]
