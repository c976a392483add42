"""`dlog acl` and `dlog audit`: rules of access, and whether an audit log is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.access.audit import AuditLine, Chain
from dlcore.sync import open_namespace
from tests.fixtures.zookeeper import ask_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.zookeeper import ZooKeeperStore
    from tests.fixtures.shell import Shell

ALICE = "allow user:alice read,append prefix pay/"
BOB = "deny user:bob read log pay/secret"


@pytest.fixture
def acl(shell: Shell) -> Iterator[Shell]:
    """The command; its rules are gone after the test."""
    yield shell
    shell.text("acl", "clear", "--yes")


@pytest.mark.integration
def test_rules_are_added_listed_tried_and_removed(acl: Shell) -> None:
    """As an operator does, and a program by the library sees the same."""
    assert "every caller may do everything" in acl.outcome("acl", "list")[2]
    assert acl.json("acl", "test", "anonymous", "manage")["allowed"]
    acl.text("acl", "allow", "user:alice", "read,append", "--prefix", "pay/")
    acl.text("acl", "deny", "user:bob", "read", "--log", "pay/secret")
    assert acl.json("acl", "allow", "certificate:ops", "manage", "--namespace")["rules"] == 3
    assert [each["rule"] for each in acl.json("acl", "list")][:2] == [ALICE, BOB]
    with open_namespace(acl.uri) as namespace:
        assert namespace.get_access_rules()[:2] == [ALICE, BOB]
    assert acl.json("acl", "test", "user:alice", "read", "pay/in")["allowed"]
    assert acl.json("acl", "test", "user:bob", "read", "pay/secret") == {
        "allowed": False,
        "reason": "a rule denies it",
    }
    assert "user:bob may not manage the namespace: no rule allows it" in acl.text(
        "acl", "test", "user:bob", "manage"
    )
    acl.text("acl", "remove", BOB)
    assert len(acl.json("acl", "list")) == 2


@pytest.mark.integration
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["allow", "alice", "read", "--namespace"], "expected user:NAME"),
        (["allow", "user:alice", "fly", "--namespace"], "rights 'fly': expected some of describe"),
        (["allow", "user:alice", "read"], "expected one of --log, --prefix and --namespace"),
        (["deny", "*", "read", "--log", "a", "--namespace"], "expected one of --log"),
        (["remove", BOB], "is not there"),
        (["remove", "nonsense"], "rule 'nonsense': expected allow or deny"),
        (["test", "user:*", "read"], "expected one caller"),
    ],
)
def test_mistakes_are_named_and_change_nothing(acl: Shell, command: list[str], reason: str) -> None:
    """Each as an error of the command line."""
    exit_code, _, err = acl.outcome("acl", *command)
    assert exit_code == 2
    assert reason in err
    assert not acl.json("acl", "list")


@pytest.mark.integration
def test_damaged_rules_are_named_and_cleared(acl: Shell) -> None:
    """They shut everybody out of the proxies, so there must be a way back."""

    async def damage(store: ZooKeeperStore, paths: NamespacePaths) -> None:
        node = await store.get(paths.access_rules)
        assert node is not None
        await store.put(paths.access_rules, b"{", version=node.version)

    acl.text("acl", "allow", "*", "read", "--namespace")
    ask_store(acl.uri, damage)
    exit_code, _, err = acl.outcome("acl", "list")
    assert exit_code == 1
    assert "access-rules does not parse" in err
    acl.text("acl", "clear", "--yes")
    assert not acl.json("acl", "list")


LINE = AuditLine(
    principal="user:alice", address="::1", entrance="DoAction/seal", resource="", result="ok"
)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """An audit log of two files."""
    chain = Chain()
    paths = []
    for name in ("audit.jsonl.1", "audit.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"".join(chain.next(LINE) for _ in range(3)))
        paths.append(str(path))
    return paths


def test_a_whole_audit_log_is_verified(shell: Shell, files: list[str]) -> None:
    """All at once, or the newer files after the older ones."""
    whole = shell.json("audit", "verify", *files)
    first = shell.json("audit", "verify", files[0])
    rest = shell.json("audit", "verify", files[1], "--after", first["digest"])
    assert (whole["lines"], first["lines"], rest["lines"]) == (6, 3, 3)
    assert rest["digest"] == whole["digest"]
    shell.text("audit", "verify", *files, "--expect", whole["digest"])


def test_a_line_that_is_missing_is_found(shell: Shell, files: list[str]) -> None:
    """In the middle by the chain, at the end by the digest that was kept."""
    whole = shell.json("audit", "verify", *files)
    exit_code, _, err = shell.outcome("audit", "verify", files[1])
    assert exit_code == 2
    assert "line 1: it follows a line with the digest" in err
    exit_code, _, err = shell.outcome("audit", "verify", files[0], "--expect", whole["digest"])
    assert exit_code == 2
    assert f"not {whole['digest']}" in err
