"""Access to ZooKeeper: files that are given, and what is in them."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from dlcore.base.access.tls import TlsFiles
from dlcore.base.access.zookeeper import EVERYBODY, ZK_KEYS, ZooKeeperAccess
from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


def test_settings_make_an_access() -> None:
    """Those that are missing are as empty ones."""
    assert ZooKeeperAccess.of({}) == ZooKeeperAccess.of(dict.fromkeys(ZK_KEYS, "")) == EVERYBODY
    given = {"zk_tls_ca": "ca.pem", "zk_auth_file": "user", "uri": "any"}
    access = ZooKeeperAccess.of(given)
    assert access == ZooKeeperAccess(tls=TlsFiles(ca="ca.pem"), auth_file="user")
    assert pickle.loads(pickle.dumps(access)) == access
    with pytest.raises(ConfigurationError, match="zk_tls_ca, zk_tls_cert, zk_tls_key: TLS with"):
        ZooKeeperAccess.of({"zk_tls_cert": "c.pem", "zk_tls_key": "c.key"})


def test_a_user_and_its_password_are_read_from_a_file(tmp_path: Path) -> None:
    """A password may have colons, and is shown nowhere."""
    file = tmp_path / "user"
    access = ZooKeeperAccess(auth_file=str(file))
    file.write_text("dlog:se:cret\n")
    found = access.credentials()
    assert found is not None
    assert (found.user, found.secret) == ("dlog", "dlog:se:cret")
    assert "cret" not in repr(found)
    assert EVERYBODY.credentials() is None
    for wrong in ("", "dlog", "dlog:", ":secret", "dlog:a\nother:b"):
        file.write_text(wrong)
        with pytest.raises(ConfigurationError, match="one line user:password") as refused:
            access.credentials()
        assert "secret" not in str(refused.value)
    file.unlink()
    with pytest.raises(ConfigurationError, match=f"zk_auth_file='{file}': expected a readable"):
        access.credentials()
