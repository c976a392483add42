"""Files of TLS that change while a process runs."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlcore.base.access.tls_in_use import LOOK_S, TlsInUse
from dlcore.base.errors import ConfigurationError
from tests.fixtures.certificates import Authority

if TYPE_CHECKING:
    from dlcore.base.access.tls import TlsFiles


class Steady:
    """A clock that the test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def put(new: TlsFiles, at: TlsFiles, *names: str) -> None:
    """Write the content of some files over others."""
    for name in names:
        shutil.copyfile(getattr(new, name), getattr(at, name))


@pytest.fixture
def steady() -> Steady:
    """A clock that stands."""
    return Steady()


def test_a_new_certificate_key_and_authority_are_used_at_the_next_look(
    tmp_path: Path, steady: Steady
) -> None:
    """All that is made of the files is made again, and until then all of it is the same."""
    files = Authority(tmp_path / "one").issue("server")
    in_use = TlsInUse(files, steady=steady)

    def made() -> list[object]:
        server = in_use.server_context(asks_clients=True)
        return [in_use.client_context(), server, in_use.channel_credentials()]

    first, expires_ms = made(), in_use.expires_at_ms
    put(Authority(tmp_path / "two", days=40).issue("server", days=40), files, "ca", "cert", "key")
    assert made() == first
    steady.now_s += LOOK_S
    second = made()
    assert not set(map(id, first)) & set(map(id, second))
    assert made() == second
    assert expires_ms is not None
    assert in_use.expires_at_ms is not None
    assert in_use.expires_at_ms > expires_ms


def test_files_that_do_not_fit_are_not_used_and_logged_once(
    tmp_path: Path, steady: Steady, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate whose key comes later, half of a file, and one that is away for a while."""
    authority = Authority(tmp_path / "ca")
    files, new = authority.issue("server"), authority.issue("new")
    in_use = TlsInUse(files, steady=steady)
    first = in_use.client_context()

    def look() -> list[str]:
        caplog.clear()
        steady.now_s += LOOK_S
        in_use.look()
        return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]

    look()
    put(new, files, "cert")
    (logged,) = look()
    assert files.cert in logged
    assert "stay as they were" in logged
    assert look() == []
    assert in_use.client_context() is first
    put(new, files, "key")
    assert look() == []
    second = in_use.client_context()
    assert second is not first
    whole = Path(files.cert).read_bytes()
    Path(files.cert).write_bytes(whole[: len(whole) // 2])
    assert len(look()) == 1
    Path(files.cert).unlink()
    (logged,) = look()
    assert f"cert={files.cert!r}" in logged
    Path(files.cert).write_bytes(whole)
    assert look() == []
    assert in_use.client_context() is second


def test_files_that_change_while_they_are_read_are_left_to_the_next_look(
    tmp_path: Path, steady: Steady, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the parts that are made of them could be of different files."""
    authority = Authority(tmp_path / "ca")
    files = authority.issue("server")
    in_use = TlsInUse(files, steady=steady)
    first = in_use.client_context()
    put(authority.issue("second"), files, "cert", "key")
    third = authority.issue("third")

    def make(given: TlsFiles) -> object:
        put(third, files, "cert", "key")
        monkeypatch.undo()
        return given.client_context()

    monkeypatch.setattr(type(files), "client_context", make)
    steady.now_s += LOOK_S
    assert in_use.client_context() is first
    steady.now_s += LOOK_S
    assert in_use.client_context() is not first


def test_expiry_is_logged_at_the_start_and_again_after_a_day(
    tmp_path: Path, steady: Steady, caplog: pytest.LogCaptureFixture
) -> None:
    """Each process tells it in its log."""

    class Day:
        days = 0

        def now_ms(self) -> int:
            return int(Path(files.cert).stat().st_mtime * 1000) + self.days * 24 * 3600 * 1000

        def new_token(self) -> str:
            raise NotImplementedError

    files = Authority(tmp_path / "ca", days=99).issue("server", days=13)
    clock = Day()
    in_use = TlsInUse(files, steady=steady, clock=clock)
    assert [files.cert in each.getMessage() for each in caplog.records] == [True]
    for clock.days, count in ((0, 1), (1, 2)):
        steady.now_s += LOOK_S
        in_use.look()
        assert len(caplog.records) == count


def test_files_that_are_none_are_refused_at_the_start(tmp_path: Path) -> None:
    """As by the files themselves."""
    files = Authority(tmp_path / "ca").issue("server")
    Path(files.key).write_text("no key")
    with pytest.raises(ConfigurationError, match=r"key="):
        TlsInUse(files)
    assert TlsInUse.of(None) is None
