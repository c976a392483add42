"""`dlog upgrade`: obstacles are reported, and features are finalized for good.

The members of the release before have none of the features in question.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from dlcore.base import features
from dlcore.base.clock import SystemClock
from dlcore.base.config import LogConfig, LogSettings, QuorumConfig
from dlcore.base.errors import UnsupportedError
from dlcore.base.features import Announced, Feature, Release, own_release
from dlcore.base.records import LogRecord
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.log.metadata.owner import StagingProcess
from dlcore.log.metadata.values import LockHolder
from dlcore.metadata.binding import ClusterFeatures, ensure_namespace, read_binding
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.stored import encode
from dlcore.ops.autorecovery.values import RecoveryMember
from dlcore.ops.sandbox.process import wait_until
from dlcore.ops.upgrade_report import Role
from dlcore.proxy.load import LiveProxy
from dlcore.sync import open_namespace
from tests.fixtures.aio import run
from tests.fixtures.metadata_backend import SERVERS, Backend
from tests.fixtures.shell import Shell

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from dlcore.metadata.port import MetadataStore
    from dlcore.ops.sandbox.cluster import Sandbox

NAME = features.COLD_SEGMENTS
NEW = Feature(name=NAME, since="9.0.0", gates="a format", announced=Announced.REGISTRATION)
BEFORE = Release(version="0.1.9")

pytestmark = pytest.mark.integration
on_each_store = pytest.mark.parametrize("backend", SERVERS, indirect=True)


@pytest.fixture
def _has_a_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this release know one feature, which a namespace of the release before does not have."""
    monkeypatch.setattr(features, "FEATURES", (NEW,))


def _old(paths: NamespacePaths) -> dict[str, bytes]:
    """Return the nodes of members of the release before, by path."""
    bookie = BookieRegistration(name="old", incarnation="1", address="h:1", release=BEFORE)
    lock = LockHolder(owner="h:7", token="t", release=BEFORE)
    return {
        paths.bookie_available("old"): encode(bookie),
        paths.proxy("grpc://old:1"): encode(LiveProxy(secret="s", release=BEFORE)),
        paths.recovery_member("old"): encode(RecoveryMember(owner="old:1", release=BEFORE)),
        f"{paths.heads}/00/log-1/lock": encode(lock),
        paths.staging_owner("t1"): encode(StagingProcess(owner="h:8", release=BEFORE)),
    }


def _new(paths: NamespacePaths) -> dict[str, bytes]:
    """Return the nodes of members of this release by path."""
    own = own_release()
    registration = BookieRegistration(
        name="b", incarnation="1", address="h:1", read_only=True, release=own
    )
    lock = LockHolder(owner="grpc://p:1", token="t", release=own)
    return {
        paths.bookie_readonly("b"): encode(registration),
        paths.proxy("grpc://p:1"): encode(LiveProxy(secret="s", release=own)),
        paths.recovery_member("m"): encode(RecoveryMember(owner="a:1", release=own)),
        f"{paths.heads}/00/log-2/lock": encode(lock),
        f"{paths.heads}/01/log-3/lock": encode(LockHolder(owner="c:1", token="t", release=own)),
        paths.staging_owner("t2"): encode(StagingProcess(owner="c:2", release=own)),
    }


def _cluster(
    backend: Backend, capsys: pytest.CaptureFixture[str], nodes: Mapping[str, bytes]
) -> Shell:
    """Make a namespace with these nodes; return a shell there."""

    async def make(store: MetadataStore) -> None:
        with pytest.MonkeyPatch.context() as as_before:
            as_before.setattr(features, "FEATURES", ())
            await ensure_namespace(store, NamespacePaths(backend.root), SystemClock())
        for path, value in nodes.items():
            await store.create(path, value, make_parents=True)

    _asked(backend, make)
    return Shell(f"distributedlog://{backend.servers}{backend.root}", capsys)


def _asked(backend: Backend, scenario: Callable[[MetadataStore], Awaitable[None]]) -> None:
    async def main() -> None:
        store = await backend.connect()
        try:
            await scenario(store)
        finally:
            await store.aclose()

    run(main())


@on_each_store
@pytest.mark.usefixtures("_has_a_feature")
def test_every_member_of_the_release_before_is_in_the_way(
    backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is named with its role, and nothing is finalized."""
    paths = NamespacePaths(backend.root)
    shell = _cluster(backend, capsys, _new(paths) | _old(paths))
    code, out, _ = shell.outcome("upgrade", "check", "--json")
    reply = json.loads(out)
    assert (code, reply["may_finalize"], reply["unfinalized"]) == (1, False, [NAME])
    old = {
        (each["role"], each["name"])
        for each in reply["members"]
        if each["version"] == BEFORE.version
    }
    assert old == {
        ("bookie", "old"),
        ("proxy", "grpc://old:1"),
        ("auto-recovery", "old:1"),
        ("client", "h:7"),
        ("client", "h:8"),
    }
    assert len(reply["obstacles"]) == len(old)
    code, out, _ = shell.outcome("upgrade", "check")
    assert code == 1
    assert f"bookie old runs 0.1.9, which lacks {NAME}" in out
    code, _, err = shell.outcome("upgrade", "finalize", "--yes")
    assert code == 1
    assert f"error: not finalized, in the way: bookie old runs 0.1.9, which lacks {NAME}" in err
    assert json.loads(shell.outcome("upgrade", "check", "--json")[1])["finalized"] == []


@on_each_store
@pytest.mark.usefixtures("_has_a_feature")
def test_where_all_have_it_a_feature_is_finalized_for_good(
    backend: Backend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used from then on, and no release without it opens the namespace."""
    paths = NamespacePaths(backend.root)
    shell = _cluster(backend, capsys, _new(paths))

    async def unused(store: MetadataStore) -> None:
        assert not await ClusterFeatures(store, paths).has(NAME)
        with pytest.raises(UnsupportedError, match="dlog upgrade finalize"):
            await ClusterFeatures(store, paths).require(NAME)

    async def used(store: MetadataStore) -> None:
        cluster = ClusterFeatures(store, paths)
        await cluster.require(NAME)
        monkeypatch.setattr(features, "FEATURES", ())
        assert await cluster.has(NAME)  # it is not asked again
        with pytest.raises(UnsupportedError, match=f"uses {NAME}, which dlog .* does not have"):
            await read_binding(store, paths)
        with pytest.raises(UnsupportedError, match="install that one here"):
            await ensure_namespace(store, paths, SystemClock())

    output = shell.json("upgrade", "check")
    assert (output["may_finalize"], output["obstacles"]) == (True, [])
    found = {(each["role"], each["name"], *each["features"]) for each in output["members"]}
    assert found == {
        ("bookie", "b", NAME),
        ("proxy", "grpc://p:1", NAME),
        ("auto-recovery", "a:1", NAME),
        ("client", "c:1", NAME),
        ("client", "c:2", NAME),
    }
    _asked(backend, unused)
    settings = LogSettings(tier="file:///nowhere")
    shell.text("log", "create", "bare")
    tier = ("log", "settings", "bare", "--set", "tier=file:///nowhere")
    assert f"the feature {NAME!r} is not finalized" in shell.outcome(*tier)[2]
    with open_namespace(shell.uri) as namespace, pytest.raises(UnsupportedError, match=NAME):
        namespace.create_log("tiered", settings=settings)
    assert shell.json("upgrade", "finalize", "--yes") == {"finalized": [NAME]}
    assert shell.json("upgrade", "finalize", "--yes") == {"finalized": [NAME]}
    assert "nothing to finalize" in shell.text("upgrade", "check")
    shell.text(*tier)
    with open_namespace(shell.uri) as namespace:
        namespace.create_log("tiered", settings=settings)
    # Features that a later release has, as far as this cluster knows.
    table = shell.outcome("log", "settings", "bare", "--set", "table=delta")
    assert f"the feature {features.TIER_SETTINGS!r} is not finalized" in table[2]
    fork = shell.outcome("log", "fork", "bare", "other")
    assert f"the feature {features.FORKS!r} is not finalized" in fork[2]
    _asked(backend, used)
    assert "install that one here" in shell.outcome("log", "list")[2]


@on_each_store
@pytest.mark.usefixtures("_has_a_feature")
def test_a_member_whose_registration_is_damaged_is_in_the_way(
    backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may lack the feature."""
    paths = NamespacePaths(backend.root)
    nodes = {paths.proxy("grpc://p:1"): b"{", paths.staging_owner("t1"): b"{"}
    code, out, _ = _cluster(backend, capsys, nodes).outcome("upgrade", "check")
    assert code == 1
    assert "proxy grpc://p:1 cannot be read: LiveProxy at" in out
    assert "client staging t1 cannot be read: StagingProcess at" in out


def test_processes_tell_their_release(fresh_sandbox: Callable[..., Sandbox], shell: Shell) -> None:
    """Each kind of them, and a client that writes."""
    shell.uri = fresh_sandbox(1, proxies=1, autorecovery=True).uri
    config = LogConfig(quorum=QuorumConfig(1, 1, 1))
    with open_namespace(shell.uri, config=config) as namespace:
        log = namespace.open_log("clicks", create_if_missing=True)
        with log.open_writer() as writer:
            writer.write(LogRecord(1, b"1"))
            roles = {each.value for each in Role}
            reported: dict[str, list[dict[str, str]]] = {}

            def are_all_there() -> bool:
                reported.update(shell.json("upgrade", "check"))
                return {each["role"] for each in reported["members"]} == roles

            assert wait_until(are_all_there, timeout_s=60), reported
    own = own_release()
    assert {(each["version"], *each["features"]) for each in reported["members"]} == {
        (own.version, *own.features)
    }
