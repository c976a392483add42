"""The pictures of docs/console.md, taken of the real page by Chromium.

``python -m tests.console_pictures`` writes them; no test compares them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from dlcore.base.ids import DLSN
from dlcore.ops.sandbox.cluster import Sandbox
from dlcore.sync import open_namespace
from tests.fixtures.browser import Seen, chromium, console_process, page_of

if TYPE_CHECKING:
    from playwright.sync_api import FloatRect

    from dlcore.sync import Namespace

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
VIEW = {"width": 1040, "height": 900}
LOG = "taxi/trips"
SCHEMA = pa.schema([("city", pa.string()), ("fare", pa.float64()), ("paid", pa.bool_())])
CITIES = ("Lisbon", "Oslo", "Rome", "Vienna")


def fill(namespace: Namespace) -> None:
    """Make some logs, one of them with columns, several segments and subscribers."""
    rng = random.Random(1)
    for name in ("clicks/eu", "clicks/us", "orders"):
        namespace.create_log(name)
        with namespace.open_log(name) as log, log.open_stream_writer() as stream:
            stream.write(b"x" * rng.randrange(10_000, 90_000))
    namespace.create_log(LOG, schema=SCHEMA)
    with namespace.open_log(LOG) as log:
        for count in (900, 1400, 600, 1100):
            rows = pa.record_batch(
                [
                    [rng.choice(CITIES) for _ in range(count)],
                    [round(rng.uniform(3, 60), 2) for _ in range(count)],
                    [rng.random() < 0.9 for _ in range(count)],
                ],
                schema=SCHEMA,
            )
            with log.open_writer() as writer:
                for start in range(0, count, 100):
                    writer.write_batch(rows.slice(start, 100))
        positions = [segment.lssn for segment in log.get_log_segments()]
        end = log.get_snapshot().end
        log.move_subscription("billing", dlsn=end)
        log.move_subscription("spark:5d0c31fa77b2", dlsn=DLSN(positions[2], 0, 0))


def take(seen: Seen, scheme: str) -> None:
    """Take the pictures in one scheme: the first page in light, a log in dark."""
    seen.open()
    page = seen.page
    page.get_by_role("table", name="Bookies").wait_for()
    if scheme == "dark":
        page.get_by_role("link", name=LOG).click()
        page.get_by_role("button", name="Start").click()
        page.get_by_role("log").get_by_role("row").nth(20).wait_for()
        page.mouse.click(1, 1)
    page.get_by_text("/s").first.wait_for()
    height = min(page.evaluate("document.documentElement.scrollHeight"), 1300)
    clip: FloatRect = {"x": 0, "y": 0, "width": VIEW["width"], "height": height}
    page.screenshot(path=FOLDER / f"console-{scheme}.png", clip=clip, full_page=True)


def main() -> None:
    """Start a cluster and a console, and take the pictures."""
    FOLDER.mkdir(exist_ok=True)
    with Sandbox(3, proxies=2) as sandbox:
        with open_namespace(sandbox.uri) as namespace:
            fill(namespace)
        with console_process(f"--uri={sandbox.uri}") as url, chromium() as browser:
            for scheme in ("light", "dark"):
                with page_of(browser, url, color_scheme=scheme, viewport=VIEW) as seen:
                    take(seen, scheme)


if __name__ == "__main__":
    main()
