"""The console's page in a real browser, over a real cluster and proxy.

Goal: an operator sees the cluster, follows a log and changes it by mouse or keyboard, on a large or
small screen, light or dark, by eye or by screen reader; and nothing that names or records hold is
more than text.  Method: headless Chromium; each page must ask only the console, write nothing
to its own log, and break no rule of its content security policy.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pytest

from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace
from tests.fixtures.browser import console_process, page_of
from tests.fixtures.lengths import sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import Namespace

pytestmark = pytest.mark.integration
MARKUP = '<img src="x" onerror="alert(1)"><script>alert(2)</script>'
SCHEMES = ["light", "dark"]
VIEWPORTS = [{"width": 360, "height": 640}, {"width": 1280, "height": 900}]


@pytest.fixture(scope="module")
def namespace(sandbox: Sandbox) -> Iterator[Namespace]:
    """The namespace of the shared cluster."""
    with open_namespace(sandbox.uri) as namespace:
        yield namespace


@pytest.fixture(scope="module")
def url(namespace: Namespace) -> Iterator[str]:
    """The address of a console of that namespace."""
    with console_process(f"--uri={namespace.uri}") as url:
        yield url


@pytest.fixture
def log(namespace: Namespace) -> str:
    """A log with two segments of ten records."""
    name = f"clicks-{uuid4().hex[:6]}"
    namespace.create_log(name)
    for _ in range(2):
        append(namespace, name, *[b"%d" % n for n in range(10)])
    return name


def append(namespace: Namespace, log: str, *payloads: bytes) -> None:
    """Append records as one segment."""
    with namespace.open_log(log) as manager, manager.open_writer() as writer:
        writer.write_bulk(LogRecord(txid=0, payload=payload) for payload in payloads)


def see(page: Page, log: str) -> None:
    """Choose a log in the list, which holds those of other tests too."""
    page.get_by_label("Names that contain").fill(log)
    page.get_by_role("link", name=log).click()
    page.get_by_role("heading", name=log).wait_for()


def test_the_cluster_and_its_logs(
    browser: Browser, url: str, namespace: Namespace, log: str
) -> None:
    """Bookies with their space, logs with records and lag, and a log's picture."""
    with namespace.open_log(log) as manager:
        manager.move_subscription("ann", dlsn=manager.get_first_dlsn())
    with page_of(browser, url) as seen:
        seen.open()
        assert seen.page.url.endswith("/#/")  # the secret is gone from the address
        bookies = seen.page.get_by_role("table", name="Bookies")
        bookies.wait_for()
        assert bookies.get_by_role("row").count() == 1 + 4
        assert "writable" in bookies.inner_text()
        seen.page.get_by_label("Names that contain").fill(log)
        row = seen.page.get_by_role("row").filter(has_text=log)
        row.wait_for()
        assert re.search(r"\b20\b", row.inner_text())
        see(seen.page, log)
        picture = seen.page.get_by_role("img")
        assert "2 segments with 20 records" in (picture.get_attribute("aria-label") or "")
        assert seen.page.locator("svg rect.final, svg rect.grows").count() == 2
        assert "ann" in seen.page.get_by_role("table", name="Subscribers").inner_text()


def test_the_tail_moves(browser: Browser, url: str, namespace: Namespace, log: str) -> None:
    """A record that is written appears; a position and an age choose where it begins."""
    with page_of(browser, url) as seen:
        seen.open()
        see(seen.page, log)
        records = seen.page.get_by_role("log")
        seen.page.get_by_role("button", name="Start").click()
        records.get_by_role("row").filter(has_text="2:0:9").wait_for()
        append(namespace, log, b"a new record")
        records.get_by_text("a new record").wait_for()
        seen.page.get_by_role("button", name="Stop").click()
        seen.page.get_by_role("textbox", name="From").fill("2:0:8")
        seen.page.get_by_role("textbox", name="From").press("Enter")
        records.get_by_text("a new record").wait_for()
        assert records.locator("tbody tr").count() == 3
        seen.page.get_by_role("textbox", name="From").fill("-1h")
        seen.page.get_by_role("textbox", name="From").press("Enter")
        records.get_by_role("row").filter(has_text="1:0:0").wait_for()


def test_columns(browser: Browser, url: str, namespace: Namespace) -> None:
    """A typed log's rows are shown by column."""
    name = f"trips-{uuid4().hex[:6]}"
    schema = pa.schema([("city", pa.string()), ("fare", pa.float64())])
    namespace.create_log(name, schema=schema)
    with namespace.open_log(name) as manager, manager.open_writer() as writer:
        writer.write_batch(pa.record_batch([["Rome", MARKUP], [1.5, None]], schema=schema))
    with page_of(browser, url) as seen:
        seen.open()
        see(seen.page, name)
        seen.page.get_by_role("button", name="Start").click()
        records = seen.page.get_by_role("log")
        records.get_by_text("Rome").wait_for()
        heads = records.get_by_role("columnheader").all_inner_texts()
        assert heads == ["position", "txid", "time", "city", "fare"]
        assert records.locator("td.null").count() == 1
        assert records.locator("img, script").count() == 0


def test_names_and_records_are_text(browser: Browser, url: str, namespace: Namespace) -> None:
    """Markup in a log's name, a subscriber's and a record is shown as it is, and does nothing."""
    name = f"b&amp;'\"-{uuid4().hex[:6]}"
    namespace.create_log(name)
    append(namespace, name, MARKUP.encode(), b"\xff\x00\xfe")
    with namespace.open_log(name) as manager:
        manager.move_subscription(MARKUP)
    with page_of(browser, url) as seen:
        seen.open()
        see(seen.page, name)
        seen.page.get_by_role("button", name="Start").click()
        seen.page.get_by_role("log").get_by_text(MARKUP).wait_for()
        assert MARKUP in seen.page.get_by_role("table", name="Subscribers").inner_text()
        assert seen.page.locator("main img, main script").count() == 0
        seen.page.goto(seen.url.partition("#")[0] + f"#/log/{MARKUP}")
        seen.page.get_by_text("invalid log name").wait_for()
        seen.allow("400")


def test_a_change_asks_first(browser: Browser, url: str, namespace: Namespace, log: str) -> None:
    """The name has to be typed; Cancel and Escape change nothing."""
    with page_of(browser, url) as seen:
        seen.open()
        see(seen.page, log)
        page, dialog = seen.page, seen.page.get_by_role("dialog")
        for end in ("Cancel", "Escape"):
            page.get_by_role("button", name="Truncate…").click()
            dialog.get_by_label("position").fill("2:0:0")
            assert dialog.get_by_role("button", name="Truncate").is_disabled()
            if end == "Cancel":
                dialog.get_by_role("button", name="Cancel").click()
            else:
                page.keyboard.press("Escape")
            dialog.wait_for(state="hidden")
        with namespace.open_log(log) as manager:
            assert manager.get_log_record_count() == 20
            page.get_by_role("button", name="Truncate…").click()
            dialog.get_by_label("position").fill("2:0:0")
            dialog.get_by_label("Type").fill(log)
            dialog.get_by_role("button", name="Truncate").click()
            page.get_by_text("Truncate: done").wait_for()
            assert manager.get_log_record_count() == 10
            page.get_by_role("button", name="Settings…").click()
            dialog.get_by_label("setting").select_option("retention_s")
            dialog.get_by_label("value").fill("3600")
            dialog.get_by_role("button", name="Change").click()
            page.get_by_text("Change: done").wait_for()
            assert manager.get_settings().retention_s == 3600
        page.get_by_role("button", name="Delete…").click()
        dialog.get_by_label("Type").fill(log)
        dialog.get_by_role("button", name="Delete").click()
        page.get_by_role("heading", name="Cluster").wait_for()
        assert not namespace.log_exists(log)
        seen.allow("404")  # for the page may have asked for the log meanwhile


def test_the_keyboard_suffices(browser: Browser, url: str, namespace: Namespace, log: str) -> None:
    """From the start of the page to a log, its tail, and a change."""
    with page_of(browser, url) as seen:
        seen.open()
        page = seen.page
        reach(page, "part")
        page.keyboard.type(log)
        page.get_by_role("link", name=log).wait_for()
        reach(page, log)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name=log).wait_for()
        page.get_by_role("button", name="Seal…").wait_for()
        reach(page, "Start")
        page.keyboard.press("Enter")
        page.get_by_role("log").get_by_text("2:0:9").wait_for()
        reach(page, "Seal…", key="Shift+Tab")
        page.keyboard.press("Enter")
        page.get_by_role("dialog").wait_for()
        reach(page, "typed")
        page.keyboard.type(log)
        page.keyboard.press("Enter")
        page.get_by_text("the log is sealed").wait_for()
        with namespace.open_log(log) as manager:
            assert manager.is_end_of_stream_marked()


def reach(page: Page, wanted: str, *, key: str = "Tab") -> None:
    """Press a key until the element with this text or id has the focus, which must be visible."""
    for _ in range(100):
        page.keyboard.press(key)
        text, is_seen = page.evaluate(
            "() => { const at = document.activeElement; return ["
            "at.textContent || at.id, getComputedStyle(at).outlineStyle !== 'none']; }"
        )
        if text == wanted:
            assert is_seen
            return
    raise AssertionError(f"{wanted!r} is not reached by {key}")


@pytest.mark.parametrize(("scheme", "viewport"), sample(product(SCHEMES, VIEWPORTS), 2))
def test_everyone_can_use_it(
    browser: Browser, url: str, log: str, scheme: str, viewport: dict[str, int]
) -> None:
    """No fault by axe, in both schemes; on a phone the page does not scroll sideways."""
    from axe_playwright_python.sync_playwright import Axe

    with page_of(browser, url, color_scheme=scheme, viewport=viewport) as seen:
        seen.open()
        seen.page.get_by_label("Names that contain").fill(log)
        seen.page.get_by_role("link", name=log).wait_for()
        for place in ("cluster", "log", "dialog"):
            if place == "log":
                see(seen.page, log)
                seen.page.locator("summary").click()
                seen.page.get_by_role("button", name="Start").click()
                seen.page.get_by_role("log").get_by_text("2:0:9").wait_for()
            elif place == "dialog":
                seen.page.get_by_role("button", name="Truncate…").click()
            found = Axe().run(seen.page)
            assert found.violations_count == 0, (place, found.generate_report())
            wide = seen.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= viewport["width"]


def test_without_the_secret_nothing_is_shown(browser: Browser, url: str) -> None:
    """A user that only knows the port sees what to do, and no name of a log."""
    with page_of(browser, url) as seen:
        seen.page.goto(url.partition("#")[0])
        seen.page.get_by_text("open the address that dlog console has printed").wait_for()
        seen.allow("401")
