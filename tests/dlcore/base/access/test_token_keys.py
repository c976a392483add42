"""Keys that change in a file or at a server, and servers that tell none."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from dlcore.base.access import key_sources
from dlcore.base.access.key_sources import KeyFile, KeyTeller
from dlcore.base.access.token_keys import fetch, open_keys
from dlcore.base.access.tokens import Keys
from dlcore.base.errors import ConfigurationError, LogNotReadyError
from tests.fixtures.aio import until
from tests.fixtures.certificates import Authority
from tests.fixtures.tokens import Issuer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_a_file_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each change at the next token; a file that has no keys changes nothing, and is reported."""
    issuer, path = Issuer(), tmp_path / "keys.json"
    path.write_bytes(issuer.key_set())

    async def body() -> None:
        source = open_keys(str(path), issuer.name)
        assert isinstance(source, KeyFile)
        assert "key-1" not in await source.keys_for("key-1")
        issuer.rotate()
        path.write_bytes(issuer.key_set())
        assert "key-1" in await source.keys_for("key-1")
        for broken in (b"broken", None):
            path.unlink() if broken is None else path.write_bytes(broken)
            assert "key-1" in await source.keys_for("key-1")
        await source.aclose()

    asyncio.run(body())
    assert caplog.text.count("the keys stay as they were") == 2


def test_a_file_without_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    """Also one that is not there."""
    (tmp_path / "empty").touch()
    for name in ("empty", "missing"):
        with pytest.raises(ConfigurationError, match=name):
            open_keys(str(tmp_path / name), "https://issuer.example")


@pytest.mark.parametrize(
    ("where", "issuer"), [("", "issuer"), ("http://x.example/keys", "https://x"), ("", "http://x")]
)
def test_keys_come_over_https_only(where: str, issuer: str) -> None:
    """No server on the way may give other ones."""
    with pytest.raises(ConfigurationError, match="https://"):
        open_keys(where, issuer)


def test_a_server_is_asked_for_a_new_key_but_not_too_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One question for all waiting callers; while it fails, the present keys stay."""
    issuer = Issuer()
    asked: list[bytes | Exception] = []
    first = issuer.key_set()
    issuer.rotate()
    answers: list[bytes | Exception] = [OSError("no route"), first, b"no keys", issuer.key_set()]

    def ask() -> bytes:
        answer = answers[len(asked)]
        asked.append(answer)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def body() -> None:
        monkeypatch.setattr(key_sources, "AGAIN_S", 1000.0)
        source = KeyTeller("https://x.example", ask, Keys.parse)
        for _ in range(2):
            with pytest.raises(LogNotReadyError, match="has not given them"):
                await source.keys_for(None)
        assert len(asked) == 1
        monkeypatch.setattr(key_sources, "AGAIN_S", 0.0)
        found = await asyncio.gather(*(source.keys_for("key-0") for _ in range(20)))
        assert len(asked) == 2
        assert all("key-0" in each for each in found)
        monkeypatch.setattr(key_sources, "AGAIN_S", 1000.0)
        for _ in range(5):
            assert "key-1" not in await source.keys_for("key-1")
        assert len(asked) == 2
        monkeypatch.setattr(key_sources, "AGAIN_S", 0.0)
        assert "key-0" in await source.keys_for("key-1")
        assert "key-1" in await source.keys_for("key-1")
        assert "key-1" in await source.keys_for("key-0")
        assert len(asked) == 4
        await source.aclose()

    asyncio.run(body())
    assert "no route" in caplog.text


def test_a_server_is_asked_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Withdrawn keys are therefore taken no more."""
    monkeypatch.setattr(key_sources, "AGAIN_S", 0.0)
    monkeypatch.setattr(key_sources, "REFRESH_S", 0.01)
    issuer = Issuer()

    async def body() -> None:
        source = KeyTeller("https://x.example", issuer.key_set, Keys.parse)
        assert "key-0" in await source.keys_for(None)
        issuer.rotate()
        del issuer.keys[0]

        await until(lambda: source._keys is not None and "key-0" not in source._keys)
        await source.aclose()

    asyncio.run(asyncio.wait_for(body(), 60))


@contextmanager
def served(authority: Authority, pages: dict[str, bytes]) -> Iterator[str]:
    """Yield the URL of a server of HTTPS; a page that begins with https is a redirection."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            moved = page is not None and page.startswith(b"https:")
            self.send_response(404 if page is None else 302 if moved else 200)
            if moved:
                self.send_header("Location", (page or b"").decode())
            self.end_headers()
            self.wfile.write(page or b"")

        def log_message(self, format: str, *_: object) -> None:  # noqa: A002 - its name there
            logging.getLogger(__name__).debug(format)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    files = authority.issue("issuer")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """The authority that this process trusts, as the system's authorities."""
    authority = Authority(tmp_path / "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    return authority


def test_keys_are_found_by_the_issuers_discovery_document(authority: Authority) -> None:
    """The issuer's document names it, and a page of HTTPS; a page of keys may be given as well."""
    issuer = Issuer()
    pages: dict[str, bytes] = {"/keys": issuer.key_set()}
    with served(authority, pages) as url:

        def discovery(**more: object) -> None:
            document = {"issuer": url, "jwks_uri": f"{url}/keys", **more}
            pages["/.well-known/openid-configuration"] = json.dumps(document).encode()

        async def found(where: str, name: str) -> bool:
            source = open_keys(where, name)
            try:
                return "key-0" in await source.keys_for(None)
            except LogNotReadyError:
                return False
            finally:
                await source.aclose()

        discovery()
        assert asyncio.run(found("", url))
        assert asyncio.run(found(f"{url}/keys", "a user"))
        discovery(issuer="https://other.example")
        assert not asyncio.run(found("", url))
        discovery(jwks_uri=f"http{url[5:]}/keys")
        assert not asyncio.run(found("", url))
        pages["/.well-known/openid-configuration"] = b"[]"
        assert not asyncio.run(found("", url))


def test_the_answer_of_a_key_server_is_bounded(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In size and in time; it may not send us elsewhere, and must be who it is."""
    pages = {"/large": bytes(key_sources.SIZE_BYTES_MAX + 1), "/fine": b"{}"}
    with served(authority, pages) as url:
        pages["/away"] = f"{url}/fine".encode()
        assert fetch(f"{url}/fine") == b"{}"
        with pytest.raises(ValueError, match="tells more than"):
            fetch(f"{url}/large")
        for page in ("away", "none"):
            with pytest.raises(OSError, match=r"HTTP Error (302|404)"):
                fetch(f"{url}/{page}")
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(OSError, match="certificate verify failed"):
            fetch(f"{url}/fine")
