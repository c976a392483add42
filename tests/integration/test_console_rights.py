"""The console over a proxy, started by a user who may not do all that the page offers.

The browser runs only while the page is shown: it has this thread's event loop, which starting and
ending proxies needs, too.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore.sync import open_namespace
from tests.fixtures.browser import chromium, console_process, page_of, require_chromium
from tests.fixtures.proxies import proxy_process, wait_for_no_proxy
from tests.fixtures.tokens import AUDIENCE, ISSUER, Issuer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import Namespace

pytestmark = pytest.mark.integration


@contextmanager
def rule(namespace: Namespace, text: str) -> Iterator[None]:
    """Add a rule of access, and remove it at the end."""
    namespace.change_access_rules(add=[text])
    try:
        yield
    finally:
        namespace.change_access_rules(remove=[text])


def test_a_user_without_the_right_gets_an_error(sandbox: Sandbox, tmp_path: Path) -> None:
    """Over proxies the rights are those of the token with which the console was started."""
    issuer = Issuer()
    (tmp_path / "keys.json").write_bytes(issuer.key_set())
    (tmp_path / "token").write_text(issuer.token("reader"))
    require_chromium()
    wait_for_no_proxy(sandbox.uri)
    log = f"rights-{uuid4().hex[:6]}"
    with (
        open_namespace(sandbox.uri) as namespace,
        rule(namespace, "allow user:reader read namespace"),
        proxy_process(
            sandbox.uri,
            f"--token-issuer={ISSUER}",
            f"--token-audience={AUDIENCE}",
            f"--token-keys={tmp_path / 'keys.json'}",
        ) as proxy,
        console_process(
            f"--endpoint={proxy.location}", f"--token-file={tmp_path / 'token'}"
        ) as url,
        chromium() as browser,
        page_of(browser, url) as seen,
    ):
        namespace.create_log(log)
        seen.open()
        seen.page.get_by_text("not reported by proxies").wait_for()
        assert proxy.location in seen.page.get_by_role("table", name="Proxies").inner_text()
        seen.page.get_by_label("Names that contain").fill(log)
        seen.page.get_by_role("link", name=log).click()
        seen.page.get_by_role("button", name="Seal…").click()
        dialog = seen.page.get_by_role("dialog")
        dialog.get_by_label("Type").fill(log)
        dialog.get_by_role("button", name="Seal").click()
        alert = dialog.get_by_role("alert")
        alert.filter(has_text="user:reader").wait_for()
        seen.allow("403")
        with namespace.open_log(log) as manager:
            assert not manager.is_end_of_stream_marked()
