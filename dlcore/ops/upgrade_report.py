"""The judgement whether the features of a release may be finalized for a cluster.

A feature may be finalized once every member has it.  A member whose registration cannot be read may
lack it, and is in the way like one that does.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dlcore.base.features import UNKNOWN_RELEASE, Release


class Role(enum.StrEnum):
    """The work of a member; the order is that of an upgrade."""

    BOOKIE = "bookie"
    AUTORECOVERY = "auto-recovery"
    PROXY = "proxy"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the cluster, or a client that writes; `problem`: it cannot be read."""

    role: Role
    name: str
    release: Release = UNKNOWN_RELEASE
    problem: str = ""

    @property
    def version(self) -> str:
        """The version of its release; the first one was the first to tell it."""
        return self.release.version or "before 0.2.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeReport:
    """The members of a cluster beside the release that looks at them.

    Attributes:
        own: the release that looks.
        finalized: the finalized features.
        members: all members.
    """

    own: Release
    finalized: tuple[str, ...]
    members: tuple[Member, ...]

    @property
    def unfinalized(self) -> tuple[str, ...]:
        """The features of this release that are not finalized."""
        return Release(features=self.finalized).lacks(self.own.features)

    @property
    def obstacles(self) -> tuple[str, ...]:
        """The reasons against finalizing this release's features, in words."""
        wanted = {*self.own.features, *self.finalized}
        found = []
        for member in self.members:
            if member.problem:
                found.append(f"{member.role} {member.name} cannot be read: {member.problem}")
            elif lacking := member.release.lacks(wanted):
                found.append(
                    f"{member.role} {member.name} runs {member.version}, which lacks "
                    f"{', '.join(lacking)}"
                )
        return tuple(found)

    @property
    def may_finalize(self) -> bool:
        """Whether there is something to finalize, and nothing is in its way."""
        return bool(self.unfinalized) and not self.obstacles

    def summary(self) -> str:
        """Return in a sentence what can be done now."""
        if obstacles := self.obstacles:
            return f"in the way: {'; '.join(obstacles)}"
        if names := self.unfinalized:
            return f"nothing is in the way of finalizing {', '.join(names)}: dlog upgrade finalize"
        return "nothing to finalize: all features of this release are in use"
