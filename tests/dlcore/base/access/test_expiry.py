"""The dates when certificates expire, and how often they are reported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from dlcore.base.access.expiry import WARNED_BEFORE_MS, Expiries, Expiry, dates_of, time_of
from dlcore.base.access.tls import PemBytes, TlsFiles
from dlcore.base.clock import SystemClock
from dlcore.base.errors import ConfigurationError
from tests.fixtures.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

DAY_MS = 24 * 3600 * 1000
END_MS = 1_800_000_000_000


def test_a_warning_comes_once_a_day_from_two_weeks_before() -> None:
    """It names the file, the days that are left and the date; a new certificate begins anew."""
    expiries, file = Expiries(), Expiry("/etc/dlog/a.pem", END_MS)
    assert expiries.due([file], now_ms=END_MS - WARNED_BEFORE_MS - 1) == []
    (due,) = expiries.due([file], now_ms=END_MS - WARNED_BEFORE_MS)
    assert "/etc/dlog/a.pem expires in 14 days, at 2027-01-15T08:00:00Z" in due
    begun_ms = END_MS - WARNED_BEFORE_MS
    assert expiries.due([file], now_ms=begun_ms + DAY_MS - 1) == []
    (due,) = expiries.due([file], now_ms=begun_ms + DAY_MS)
    assert "in 13 days" in due
    newer = Expiry("/etc/dlog/a.pem", END_MS + 1)
    assert len(expiries.due([newer], now_ms=begun_ms + DAY_MS)) == 1
    (due,) = expiries.due([file], now_ms=END_MS)
    assert "has expired" in due


def test_the_dates_are_those_of_the_own_certificate_and_of_the_last_authority(
    tmp_path: Path,
) -> None:
    """One authority is enough, and files of a client may have no certificate."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new", days=40)
    files = new.issue("server", days=20)
    both = old.ca.read_bytes() + new.ca.read_bytes()
    content = PemBytes(both, files.content().cert, files.content().key)
    own, authorities = dates_of(files, content)
    now_ms = SystemClock().now_ms()
    assert (own.path, round((own.expires_ms - now_ms) / DAY_MS)) == (files.cert, 20)
    assert (authorities.path, round((authorities.expires_ms - now_ms) / DAY_MS)) == (files.ca, 40)
    assert [each.path for each in dates_of(TlsFiles(ca=files.ca), content)] == [files.ca]
    assert time_of(0) == "1970-01-01T00:00:00Z"


def test_a_file_without_a_certificate_is_named_and_without_the_package_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client through proxies need not have the package."""
    files = Authority(tmp_path / "ca").issue("one")
    broken = files.content()._replace(cert=b"-----BEGIN CERTIFICATE-----\nno")
    with pytest.raises(ConfigurationError, match=f"{files.cert!r}: expected PEM"):
        dates_of(files, broken)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert dates_of(files, files.content()) == []
