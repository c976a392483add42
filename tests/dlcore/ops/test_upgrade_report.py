"""Members that lack a feature are in its way, and no others are."""

from __future__ import annotations

import pytest

from dlcore.base.features import UNKNOWN_RELEASE, Release
from dlcore.ops.upgrade_report import Member, Role, UpgradeReport

OWN = Release(version="0.4.0", features=("cold", "newer"))
NEW = Member(Role.BOOKIE, "b1", OWN)
OLD = Member(Role.PROXY, "grpc://p:1", UNKNOWN_RELEASE)
PART = Member(Role.CLIENT, "c:1", Release(version="0.3.0", features=("cold",)))
BROKEN = Member(Role.AUTORECOVERY, "a:1", problem="it does not parse")


def report(*members: Member, finalized: tuple[str, ...] = (), own: Release = OWN) -> UpgradeReport:
    """Return a report of these members."""
    return UpgradeReport(own=own, finalized=finalized, members=members)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([OLD], ["proxy grpc://p:1 runs before 0.2.0, which lacks cold, newer"]),
        ([PART], ["client c:1 runs 0.3.0, which lacks newer"]),
        ([BROKEN], ["auto-recovery a:1 cannot be read: it does not parse"]),
        ([NEW], []),
        ([], []),
    ],
)
def test_a_member_without_a_feature_is_in_the_way(members: list[Member], words: list[str]) -> None:
    """A member with all of them is not, and no other one is named."""
    found = report(NEW, *members)
    assert list(found.obstacles) == words
    assert found.may_finalize is (not words)
    assert all(word in found.summary() for word in words or ["dlog upgrade finalize"])


def test_there_may_be_nothing_to_finalize() -> None:
    """All is in use, or this release has nothing new."""
    for found in (report(NEW, finalized=OWN.features), report(OLD, own=Release(version="0.4.0"))):
        assert (found.unfinalized, found.obstacles, found.may_finalize) == ((), (), False)
        assert found.summary().startswith("nothing to finalize")


def test_a_member_without_a_finalized_feature_is_in_the_way() -> None:
    """Also where this release has none that is not finalized: it should not run any more."""
    found = report(PART, finalized=OWN.features)
    assert found.obstacles == ("client c:1 runs 0.3.0, which lacks newer",)
    assert report(PART, finalized=("cold",)).unfinalized == ("newer",)
