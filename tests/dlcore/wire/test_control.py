"""Goal: a list of entries is what the bookie said, or unknown; what makes no sense is no proof."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from bookie.files.entry_runs import ListedRanges, RangePage
from dlcore.base.errors import BookieUnavailableError
from dlcore.base.ids import BookieId
from dlcore.wire.control import ControlClient
from tests.fixtures.served_bookie import BOOKIE, run, serve

if TYPE_CHECKING:
    from pathlib import Path


def test_channels_are_bounded() -> None:
    """Addresses of bookies change for years."""

    async def scenario() -> None:
        client = ControlClient(timeout_s=20.0)
        for port in range(1, 150):
            client._channel(f"127.0.0.1:{port}")
        assert len(client._channels) == 100
        assert "127.0.0.1:149" in client._channels
        await client.aclose()

    run(scenario)


@pytest.mark.parametrize(
    "ranges",
    [
        [(5, 9), (0, 3)],
        [(0, 5), (5, 9)],
        [(4, 3)],
        [(-2, -1)],
    ],
)
def test_ranges_that_are_out_of_order_are_unknown(
    ranges: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By such a list a bookie would count as holding what it never said it holds."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            firsts, lasts = (list(column) for column in zip(*ranges, strict=True))
            listed = ListedRanges(lambda _: RangePage(firsts, lasts, None))
            monkeypatch.setattr(served.storage.reads, "list_entries", lambda _: listed)
            client = ControlClient(timeout_s=20.0, tls=None)
            try:
                with pytest.raises(BookieUnavailableError, match="expected ascending ranges"):
                    await client.list_entries(BOOKIE, served.control_address, ledger_id=1)
            finally:
                await client.aclose()

    run(scenario)


def test_a_bookie_tells_its_figures(tmp_path: Path) -> None:
    """The one that is meant, and no other that has its address now."""

    async def scenario() -> None:
        async with serve(tmp_path) as served:
            client = ControlClient(timeout_s=20.0)
            try:
                reply = await client.ask(BOOKIE, served.control_address)
                assert (reply.ledgers, reply.read_only, reply.expires_at_ms) == (0, False, None)
                assert abs((reply.clock_ms or 0) - time.time() * 1000) < 60_000
                other = BookieId(BOOKIE.name, "f" * 32)
                with pytest.raises(BookieUnavailableError, match=BOOKIE.incarnation):
                    await client.ask(other, served.control_address)
            finally:
                await client.aclose()

    run(scenario)
