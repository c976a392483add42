"""The folder of a cluster: its certificates hold, keys are private, nothing is overwritten."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from dlcore.base.errors import ConfigurationError
from dlcore.ops.secure.folder import make_missing
from dlcore.ops.secure.plan import ClusterPlan, Places

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime.now(UTC)


def make(folder: Path, **values: Any) -> list[str]:
    """Make what is missing for a host, an address and a client."""
    fixed: dict[str, Any] = {"hosts": ("node-1", "127.0.0.1"), "clients": ("ingest",)}
    plan = ClusterPlan(
        uri="distributedlog://zk:2181/dlog", places=Places(folder=str(folder)), **(fixed | values)
    )
    return make_missing(folder, plan, now_ms=int(NOW.timestamp() * 1000), days=30)


def content(folder: Path) -> dict[str, bytes]:
    """Return all files by their paths."""
    found = (each for each in folder.rglob("*") if each.is_file())
    return {str(each.relative_to(folder)): each.read_bytes() for each in found}


def verify(folder: Path, certificate: str, *rules: str) -> str:
    """Return what OpenSSL says of a certificate, by the strict rules and those given."""
    command = ["openssl", "verify", "-x509_strict", "-CAfile", str(folder / "ca.pem"), *rules]
    done = subprocess.run(
        [*command, str(folder / certificate)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip().rpartition(" ")[2] if done.returncode == 0 else done.stderr


def test_certificates_hold_at_their_places_only(tmp_path: Path) -> None:
    """By OpenSSL's strict rules, which bookies and their clients have, too."""
    make(tmp_path)
    bookie, client = "hosts/127.0.0.1/bookie.pem", "clients/ingest/client.pem"
    assert verify(tmp_path, bookie, "-purpose", "sslserver", "-verify_ip", "127.0.0.1") == "OK"
    assert verify(tmp_path, bookie, "-purpose", "sslclient") == "OK"
    assert "IP address mismatch" in verify(tmp_path, bookie, "-verify_ip", "127.0.0.2")
    proxy = "hosts/node-1/proxy.pem"
    assert verify(tmp_path, proxy, "-purpose", "sslserver", "-verify_hostname", "node-1") == "OK"
    assert verify(tmp_path, client, "-purpose", "sslclient") == "OK"
    assert "purpose" in verify(tmp_path, client, "-purpose", "sslserver")
    other = "hosts/node-1/autorecovery.pem"  # a server of metrics
    assert verify(tmp_path, other, "-purpose", "sslserver", "-verify_hostname", "node-1") == "OK"
    ends = str(int((NOW + timedelta(days=31)).timestamp()))
    assert "expired" in verify(tmp_path, bookie, "-attime", ends)


def test_keys_are_for_their_owner_and_each_is_another(tmp_path: Path) -> None:
    """Also the folders of hosts and clients."""
    folder = tmp_path / "cluster"
    make(folder)
    keys = list(folder.rglob("*.key"))
    assert {each.stat().st_mode & 0o777 for each in keys} == {0o600}
    assert len({each.read_bytes() for each in keys}) == len(keys) == 9
    assert {each.parent.stat().st_mode & 0o777 for each in keys} == {0o700}


def test_a_server_of_zookeeper_has_its_key_and_certificate_in_one_file(tmp_path: Path) -> None:
    """As it takes them; its owner alone can read it."""
    make(tmp_path, zookeeper_tls=True)
    (store,) = tmp_path.rglob("zookeeper.store.pem")
    parts = (store.with_name(f"zookeeper.{each}").read_bytes() for each in ("key", "pem"))
    assert store.read_bytes() == b"".join(parts)
    assert store.stat().st_mode & 0o777 == 0o600
    assert not (store.parent / "zookeeper.auth").exists()


def test_all_who_reach_zookeeper_have_its_user(tmp_path: Path) -> None:
    """One long password, for their owner to read; clients of proxies have none."""
    make(tmp_path, remote_clients=("report",))
    users = sorted(tmp_path.rglob("zookeeper.auth"))
    places = {str(each.parent.relative_to(tmp_path)) for each in users}
    assert places == {".", "hosts/node-1", "hosts/127.0.0.1", "clients/ingest"}
    assert {each.stat().st_mode & 0o777 for each in users} == {0o600}
    (user,) = {each.read_text() for each in users}
    assert user.startswith("dlog:")
    assert len(user) > 40


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """Again, and with another host: only what is missing is made, by the same authority."""
    make(tmp_path)
    (tmp_path / "hosts/node-1/bookie.toml").write_text("mine")
    before = content(tmp_path)
    assert make(tmp_path) == []
    added = make(tmp_path, hosts=("node-2",))
    assert {each.rpartition("/")[0] for each in added} == {"hosts/node-2"}
    after = content(tmp_path)
    assert {name: after[name] for name in before} == before
    assert verify(tmp_path, "hosts/node-2/bookie.pem") == "OK"
    assert not list(tmp_path.rglob("*.partial"))


def test_a_certificate_that_was_removed_is_renewed(tmp_path: Path) -> None:
    """The key stays, if it is there."""
    make(tmp_path)
    path = tmp_path / "hosts/node-1/bookie.pem"
    old = x509.load_pem_x509_certificate(path.read_bytes())
    path.unlink()
    assert make(tmp_path) == ["hosts/node-1/bookie.pem"]
    new = x509.load_pem_x509_certificate(path.read_bytes())
    assert new.public_key() == old.public_key()
    assert new.serial_number != old.serial_number


def test_an_interrupted_run_is_completed(tmp_path: Path) -> None:
    """Half a file is never taken for a whole one."""
    (tmp_path / "ca.key.partial").write_bytes(b"half")
    assert "ca.key" in make(tmp_path)
    assert verify(tmp_path, "hosts/node-1/bookie.pem") == "OK"


def test_keys_and_certificates_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """The error says which, and nothing is made with them."""
    make(tmp_path)
    before = content(tmp_path)
    other = ed25519.Ed25519PrivateKey.generate()
    foreign = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    bookie = before["hosts/node-1/bookie.key"]
    for name, wrong, message in (
        ("ca.key", bookie, "the authority's key is not that of its certificate"),
        ("ca.key", b"nonsense", "the private key cannot be read"),
        ("ca.key", foreign, "is a Ed25519PrivateKey, expected one of an elliptic curve"),
        ("ca.pem", b"nonsense", "the authority's certificate cannot be read"),
    ):
        (tmp_path / name).write_bytes(wrong)
        with pytest.raises(ConfigurationError, match=message):
            make(tmp_path, hosts=("node-2",))
        (tmp_path / name).write_bytes(before[name])
    (tmp_path / "hosts/node-1/proxy.key").unlink()
    with pytest.raises(ConfigurationError, match=r"proxy\.key is missing, and its certificate"):
        make(tmp_path)
    assert not (tmp_path / "hosts/node-2").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """As an error of the command, not of Python."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="file/cluster': cannot make its files"):
        make(tmp_path / "file/cluster")
