"""The configuration of each member of a cluster: programs read it as it was meant."""

from __future__ import annotations

import tomllib
from typing import Any, get_type_hints

import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.ops.secure.plan import ClusterPlan, Places, Ports, Role

URI = "distributedlog://zk:2181/dlog"


def plan_of(**values: Any) -> ClusterPlan:
    """Return a plan of one host and one client."""
    fixed = {"uri": URI, "folder": "/c", "hosts": ("node-1",), "clients": ("ingest",)}
    given = fixed | values
    parts: dict[str, Any] = {
        name: kind(**{key: given.pop(key) for key in list(given) if key in get_type_hints(kind)})
        for name, kind in (("places", Places), ("ports", Ports))
    }
    return ClusterPlan(**given, **parts)


def settings(plan: ClusterPlan, role: Role) -> dict[str, Any]:
    """Return the settings of the first member of a role, as programs read them."""
    member = next(each for each in plan.members if each.role is role)
    return tomllib.loads(plan.settings_of(member))


def files(folder: str, stem: str) -> dict[str, str]:
    """Return the settings that name a member's files."""
    names = {"tls_ca": "ca.pem", "tls_cert": f"{stem}.pem", "tls_key": f"{stem}.key"}
    return {key: f"{folder}/{name}" for key, name in names.items()}


def user(folder: str) -> dict[str, str]:
    """Return the setting that names the user of ZooKeeper."""
    return {"zk_auth_file": f"{folder}/zookeeper.auth"}


def test_members_that_serve_and_members_that_connect() -> None:
    """A bookie serves with its files; a proxy serves and connects; others connect."""
    plan, place = plan_of(), "/c/hosts/node-1"
    assert settings(plan, Role.BOOKIE) == {
        "bookie": {
            "name": "node-1",
            "metadata_uri": URI,
            "data_dir": "/var/lib/dlog/bookie",
            "host": "0.0.0.0",
            "advertised_host": "node-1",
            "port": 3181,
            "control_port": 3182,
            "tls_client_names": "*.bookie, *.proxy, *.autorecovery, *.client",
        }
        | files(place, "bookie")
        | user(place)
    }
    assert settings(plan, Role.PROXY) == {
        "dlog": {"uri": URI} | files(place, "proxy") | user(place),
        "proxy": {
            "host": "0.0.0.0",
            "advertised_host": "node-1",
            "port": 4190,
            "token_issuer": "dlog",
            "token_audience": "dlog",
            "token_keys": f"{place}/tokens.pem",
            "super_users": "certificate:ingest.client",
            "audit_file": "/var/lib/dlog/audit.jsonl",
        }
        | files(place, "proxy"),
    }
    assert settings(plan, Role.AUTORECOVERY) == {
        "dlog": {"uri": URI} | files(place, "autorecovery") | user(place)
    }
    assert settings(plan, Role.CLIENT) == {
        "dlog": {"uri": URI} | files("/c/clients/ingest", "client") | user("/c/clients/ingest")
    }


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7"])
def test_a_host_with_an_address_listens_there(host: str) -> None:
    """Several hosts can be one machine with several addresses."""
    bookie = settings(plan_of(hosts=(host,)), Role.BOOKIE)["bookie"]
    assert (bookie["host"], "advertised_host" in bookie) == (host, False)


def test_servers_of_zookeeper_have_certificates_where_it_is_asked_for() -> None:
    """Each has its lines of zoo.cfg; their clients have files of their own, others none."""
    uri = "distributedlog://zk-1:2281,[fd00::7]:2282/dlog"
    place = 'a\\b "ö"'
    plan = plan_of(uri=uri, zookeeper_tls=True, installed=f"/{place}", remote_clients=("report",))
    servers = [each for each in plan.members if each.role is Role.ZOOKEEPER]
    assert [each.name for each in servers] == ["zk-1.zookeeper", "fd00--7.zookeeper"]
    assert list(plan.given_to(servers[0])) == ["ca.pem"]
    lines = plan.settings_of(servers[1]).splitlines()
    assert "secureClientPort=2282" in lines
    escaped = 'a\\\\b \\"\\u00f6\\"'
    for prefix in ("ssl", "ssl.quorum"):
        assert f"{prefix}.keyStore.location=/{escaped}/zookeeper.store.pem" in lines
        assert f"{prefix}.trustStore.location=/{escaped}/ca.pem" in lines
    theirs = {f"zk_{key}": path for key, path in files("/c/clients/ingest", "client").items()}
    assert theirs.items() <= settings(plan, Role.CLIENT)["dlog"].items()
    assert "zk_tls_ca" in settings(plan, Role.BOOKIE)["bookie"]
    assert "zk_tls_ca" not in settings(plan, Role.REMOTE)["dlog"]
    assert "zk_tls_ca" not in settings(plan_of(), Role.CLIENT)["dlog"]


def test_files_of_hosts_go_elsewhere_and_those_of_clients_stay() -> None:
    """A name with other letters and quotes is written so that it is read."""
    place = '/etc/dlög "1"'
    plan = plan_of(installed=place)
    assert settings(plan, Role.BOOKIE)["bookie"]["tls_key"] == f"{place}/bookie.key"
    assert settings(plan, Role.CLIENT)["dlog"]["tls_key"] == "/c/clients/ingest/client.key"


def test_zookeeper_may_stay_open() -> None:
    """As that of a sandbox: no member knows a user."""
    plan = plan_of(zookeeper_user=False)
    assert "zk_auth_file" not in "".join(map(plan.settings_of, plan.members))
    assert all("zookeeper.auth" not in plan.given_to(each) for each in plan.members)


def test_clients_of_proxies_know_nothing_else() -> None:
    """All proxies are their endpoint; other hosts' addresses have brackets where they need them."""
    plan = plan_of(hosts=("node-1", "fd00::7"), remote_clients=("report",))
    assert settings(plan, Role.REMOTE) == {
        "dlog": {"endpoint": "grpc+tls://node-1:4190,[fd00::7]:4190"}
        | files("/c/clients/report", "client")
    }


def test_certificates_are_named_after_place_and_role() -> None:
    """A rule can then mean one of them, and all of a role."""
    plan = plan_of(hosts=("node-1", "fd00::7"), remote_clients=("report",))
    names = [each.name for each in plan.members]
    assert names[:3] == ["node-1.bookie", "node-1.proxy", "node-1.autorecovery"]
    assert names[3] == "fd00--7.bookie"
    assert names[-2:] == ["ingest.client", "report.remote"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"uri": "http://zk/dlog"}, "invalid namespace URI"),
        ({"hosts": ("../etc",)}, r"host='\.\./etc': expected a name"),
        ({"hosts": ("a..b",)}, "host='a..b'"),
        ({"hosts": ("a" * 51,)}, "at most 50 letters"),
        ({"clients": ("::1",)}, "client='::1'"),
        ({"remote_clients": ("a/b",)}, "remote_client='a/b'"),
        ({"hosts": (), "remote_clients": ("a",)}, "remote_client='a': expected the hosts"),
        ({"folder": "relative"}, "^folder='relative': expected an absolute path [^;]*$"),
        ({"installed": "relative"}, "install_dir='relative'"),
        ({"data_dir": ""}, "data_dir=''"),
        ({"data_dir": "/a\nb"}, "of printable characters"),
        ({"proxy_port": 0}, "proxy_port=0"),
        ({"data_dir": "x", "hosts": ("a/b", "..")}, "host='a/b': .*; host='..': .*; data_dir='x'"),
        ({"uri": "http://zk/dlog", "clients": ("a/b",)}, "client='a/b': .*; invalid namespace URI"),
    ],
)
def test_a_wrong_plan_is_refused(values: dict[str, Any], message: str) -> None:
    """The error names each wrong value and what would be right."""
    with pytest.raises(ConfigurationError, match=message):
        plan_of(**values)
