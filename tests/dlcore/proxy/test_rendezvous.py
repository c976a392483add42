"""The choice of an owner: the same wherever it is asked, even, and stable when a proxy goes."""

from __future__ import annotations

from collections import Counter

from dlcore.proxy.rendezvous import preferred_owner

PROXIES = [f"host-{number}:4190" for number in range(5)]
LOGS = [f"log/{number}" for number in range(2000)]


def test_no_proxy_is_there() -> None:
    """Then no log has an owner."""
    assert preferred_owner("clicks", ()) is None


def test_the_order_of_the_list_does_not_matter() -> None:
    """Each proxy lists the others in its own way."""
    for log in LOGS[:100]:
        assert preferred_owner(log, PROXIES) == preferred_owner(log, reversed(PROXIES))


def test_logs_are_spread_evenly() -> None:
    """Each of five has between 300 and 500 of 2000 logs."""
    counts = Counter(preferred_owner(log, PROXIES) for log in LOGS)
    assert len(counts) == len(PROXIES)
    assert all(300 <= count <= 500 for count in counts.values())


def test_only_the_logs_of_the_one_that_goes_move() -> None:
    """All others stay where they are."""
    gone, *rest = PROXIES
    for log in LOGS:
        before = preferred_owner(log, PROXIES)
        if before != gone:
            assert preferred_owner(log, rest) == before
