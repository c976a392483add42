"""The token that a client sends: when it asks for another one, and what becomes of wrong ones."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from dlcore.backends.flight import bearer
from dlcore.backends.flight.bearer import Bearer, token_file
from dlcore.backends.flight.namespace import open_namespace
from dlcore.backends.opening import open_namespace as open_any
from dlcore.base.errors import ConfigurationError, UnauthenticatedError, UnsupportedError
from dlcore.base.records import LogRecord
from dlcore.proxy import callers
from tests.fixtures.served_proxies import Proxies, with_proxies
from tests.fixtures.tokens import AUDIENCE, ISSUER, Issuer, encoded

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.log.reading.rows_reader import AsyncLogReader


class Source:
    """Returns the given tokens, one after the other, the last one for ever."""

    def __init__(self, *tokens: Any) -> None:
        self.tokens = list(tokens)
        self.calls = 0

    def __call__(self) -> Any:
        """Return the next one."""
        self.calls += 1
        return self.tokens[min(self.calls, len(self.tokens)) - 1]


def test_a_function_is_asked_before_a_token_expires_and_when_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not for each call; a late call asks for no other one than the new one."""
    now, issuer = time.time(), Issuer()
    first, second = issuer.token("a", exp=now + 100), issuer.token("b", exp=now + 1000)
    source = Source(first, second, "opaque")
    sent = Bearer(source)
    assert [sent.token() for _ in range(5)] == [first] * 5
    monkeypatch.setattr(bearer, "wall_s", lambda: now + 89)
    assert (sent.token(), source.calls) == (first, 1)
    monkeypatch.setattr(bearer, "wall_s", lambda: now + 91)
    assert (sent.token(), source.calls) == (second, 2)
    assert sent.renewed(first)
    assert source.calls == 2
    assert sent.renewed(second)
    assert (sent.token(), source.calls) == ("opaque", 3)
    assert not sent.renewed("opaque")
    fixed = Bearer("fixed")
    assert not fixed.renewed(fixed.token())


@pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b'{"exp": 1e999}', b'{"x":' + b"[" * 9000])
def test_a_token_without_a_known_expiry_is_kept(payload: bytes) -> None:
    """Until it is refused: only the proxy has to understand it."""
    for token in (f"a.{encoded(payload)}.c", "opaque"):
        source = Source(token)
        sent = Bearer(source)
        assert (sent.token(), sent.token(), source.calls) == (token, token, 1)


@pytest.mark.parametrize("token", ["", "two words", "secret\n", "sécret", None, 7])
def test_a_token_that_cannot_be_sent_is_refused(token: Any) -> None:
    """Without a word of it, whether it is fixed or from a function."""
    with pytest.raises(UnauthenticatedError) as refused:
        Bearer(lambda: token).token()
    assert "cret" not in f"{refused.value!r}"


def test_a_function_that_fails_is_reported() -> None:
    """Its own error is the cause; what is no function is refused at once."""

    def fail() -> str:
        raise RuntimeError("no route to the issuer")

    with pytest.raises(UnauthenticatedError, match="no route to the issuer"):
        Bearer(fail).token()
    with pytest.raises(ConfigurationError, match="a token of the kind int"):
        Bearer(cast("Any", 7))
    assert "secret" not in repr(Bearer("secret"))


def test_a_token_may_be_in_a_file(tmp_path: Path) -> None:
    """It is read again each time; a file that cannot be read is named."""
    path = tmp_path / "token"
    read = token_file(str(path))
    with pytest.raises(ConfigurationError, match=r"token_file='.*/token'"):
        Bearer(read).token()
    for token in ("first", "second"):
        path.write_text(f"{token}\n")
        assert read() == token
    path.write_bytes(b"secr\xff\xfet")
    with pytest.raises(ConfigurationError) as refused:
        read()
    assert "secr" not in repr([refused.value, refused.value.__cause__])


def test_a_namespace_that_is_opened_directly_takes_no_token() -> None:
    """It would protect nothing there, and is not repeated."""
    with pytest.raises(UnsupportedError, match="a token is for proxies") as refused:
        asyncio.run(open_any("distributedlog://127.0.0.1:1/x", token="secret"))
    assert "secret" not in str(refused.value)


def settings(path: Path, issuer: Issuer) -> dict[str, Any]:
    """Return the settings of a proxy that takes tokens of the issuer, and no others."""
    (path / "keys.json").write_bytes(issuer.key_set())
    return {
        "token_issuer": ISSUER,
        "token_audience": AUDIENCE,
        "token_keys": str(path / "keys.json"),
        "token_skew_s": 0.0,
        "anonymous": "refused",
    }


@pytest.mark.parametrize("knows", [True, False])
def test_streams_go_on_with_new_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, knows: bool
) -> None:
    """Records are in the log once, and read once, though each token lasts for a moment only.

    Also if the client does not know for how long: then calls with old tokens are refused.
    """
    issuer = Issuer()
    if not knows:
        monkeypatch.setattr(bearer, "_expiry_of", lambda _: float("inf"))

    async def next_of(reader: AsyncLogReader) -> int:
        record = await reader.read_next()
        assert record is not None
        return record.txid

    async def scenario(served: Proxies) -> None:
        # A time as short as this passes while a busy machine keeps this process from its turn.
        loop_s, begun_s = asyncio.get_running_loop().time, time.time()

        def own_s() -> float:
            return begun_s + loop_s()

        for module in (bearer, callers):
            monkeypatch.setattr(module, "wall_s", own_s)
        await served.start(**settings(tmp_path, issuer))
        source = Source()

        def token() -> str:
            source.calls += 1
            return issuer.token(exp=own_s() + 0.7)

        async with await open_namespace(served.servers[0].location, token=token) as remote:
            log = await remote.open_log("a")
            found: list[int] = []
            async with await log.open_reader() as reader, await log.open_writer() as writer:
                for number in range(60):
                    await writer.write(LogRecord(number, b"%d" % number))
                    found.append(await next_of(reader))
                    await asyncio.sleep(0.05)
            async with await log.open_reader() as reader:
                again = [await next_of(reader) for _ in range(60)]
        assert found == again == list(range(60))
        assert source.calls > 3

    with_proxies("a")(scenario)


def test_a_token_that_stays_wrong_is_reported_at_once(tmp_path: Path) -> None:
    """Also by a stream; no call waits for as long as for a proxy that is gone."""
    issuer = Issuer()
    wrong = Issuer().token()

    async def scenario(served: Proxies) -> None:
        await served.start(**settings(tmp_path, issuer))
        location = served.servers[0].location
        for token in (wrong, lambda: wrong, None):
            async with (
                asyncio.timeout(30),
                await open_namespace(location, token=token, patience_s=1000) as remote,
            ):
                with pytest.raises(UnauthenticatedError) as refused:
                    await remote.get_logs()
                assert wrong not in repr(refused.value)
                staging = await remote.open_staging_writer(identity="job")
                row = pa.record_batch({"value": [b"x"]})
                await staging.write_batch("a", row)
                with pytest.raises(UnauthenticatedError):
                    await staging.stage()
                await staging.aclose()

    with_proxies("a")(scenario)
