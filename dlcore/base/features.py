"""The features that not every release has, each with what it gates.

A release reads all that the release before it wrote, and two releases may run in one cluster.  A
feature is a message or a format that the older one does not understand.  It has a row in
`FEATURES`, and is announced in one of two ways:

* A feature of the wire is a bit of HELLO and WELCOME.  It is used on a connection whose two ends
  have it, and nothing remains of it.
* A feature that changes what is stored has its name in the registration of every member.  It is
  used only once it was *finalized* for the cluster, which `dlog upgrade finalize` refuses while a
  member lacks it.  From then on a process that lacks it cannot open the namespace.

A member whose registration tells nothing is older than release 0.2.0, and has no such feature.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class Announced(enum.Enum):
    """How others learn that a process has a feature."""

    HANDSHAKE = "a bit in HELLO and WELCOME"
    REGISTRATION = "its name in registrations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One feature.

    Attributes:
        name: its name in registrations and for operators.
        since: the first release that has it.
        gates: the message or the format that earlier releases do not understand.
        announced: how others learn of it.
        bit: its bit in the handshake; 0 if registrations announce it.
    """

    name: str
    since: str
    gates: str
    announced: Announced
    bit: int = 0


COLD_SEGMENTS = "cold-segments"
TIER_SETTINGS = "tier-settings"
FORKS = "forks"
REDACTION = "redaction"
PARTIAL_REMOVAL = "partial-removal"
FEATURES: tuple[Feature, ...] = (
    Feature(
        name="read-held",
        since="0.2.0",
        gates="the message READ_HELD and its answer",
        announced=Announced.HANDSHAKE,
        bit=1,
    ),
    Feature(
        name="authorize",
        since="0.2.0",
        gates="the message AUTHORIZE",
        announced=Announced.HANDSHAKE,
        bit=2,
    ),
    Feature(
        name=COLD_SEGMENTS,
        since="0.2.0",
        gates="the setting `tier`, which leads to extents whose entries no bookie has",
        announced=Announced.REGISTRATION,
    ),
    Feature(
        name=TIER_SETTINGS,
        since="0.3.0",
        gates="the settings `table` and `tier=none`: a worker without `table` deletes objects "
        "that a table names",
        announced=Announced.REGISTRATION,
    ),
    Feature(
        name=FORKS,
        since="0.3.0",
        gates="logs that begin with segments of another one, and may end in an object",
        announced=Announced.REGISTRATION,
    ),
    Feature(
        name=REDACTION,
        since="0.3.0",
        gates="requests to bookies to erase, which an earlier one never answers",
        announced=Announced.REGISTRATION,
    ),
    Feature(
        name=PARTIAL_REMOVAL,
        since="0.3.0",
        gates="segments without their first extents, of which an earlier release misplaces the "
        "others",
        announced=Announced.REGISTRATION,
    ),
)
"""All features; a new one comes last.  A name or bit that was released is never used again."""
HANDSHAKE_BITS = {each.name: each.bit for each in FEATURES if each.bit}
"""The bits of the features of the wire."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """The release that a member of the cluster runs, as it tells others.

    `features` are the names of those that it has and that registrations announce.  Without a
    version it is older than 0.2.0, the first release.
    """

    version: str = ""
    features: tuple[str, ...] = ()

    def lacks(self, wanted: Iterable[str]) -> tuple[str, ...]:
        """Return those of the wanted features that it has not, in order."""
        return tuple(sorted(set(wanted) - set(self.features)))


UNKNOWN_RELEASE = Release()
"""The release of a member that announced none."""


def own_release() -> Release:
    """Return the release of this process."""
    names = (each.name for each in FEATURES if each.announced is Announced.REGISTRATION)
    return Release(version=_version(), features=tuple(sorted(names)))


@cache
def _version() -> str:
    try:
        return version("distributed-dlog")
    except PackageNotFoundError:
        return "unknown"  # it runs from a folder of sources
