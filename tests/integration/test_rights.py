"""Rights of callers at proxies that run as processes: by certificates, through the library."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pytest

from dlcore.base.errors import AccessDeniedError
from dlcore.sync import open_namespace
from tests.fixtures.certificates import Authority
from tests.fixtures.proxies import proxy_process, wait_for_no_proxy
from tests.fixtures.waiting import wait_until
from tests.integration.test_proxy_tls import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fixtures.shell import Shell

pytestmark = pytest.mark.integration
_TIME_S = 60.0


@pytest.fixture
def cleared(shell: Shell) -> Iterator[Shell]:
    """The command; the shared namespace has no rules after the test."""
    wait_for_no_proxy(shell.uri)
    yield shell
    shell.text("acl", "clear", "--yes")


def is_denied(call: Callable[..., Any], *arguments: Any, **options: Any) -> bool:
    """Return whether a call is denied."""
    try:
        call(*arguments, **options)
    except AccessDeniedError:
        return True
    return False


def append(log: Any) -> None:
    """Append a record."""
    with log.open_writer() as writer:
        writer.write_batch(pa.record_batch({"value": [b"x"]}))


def test_an_operator_gives_and_takes_rights(cleared: Shell, tmp_path: Path) -> None:
    """Over a proxy, and two proxies follow; the audit log is whole."""
    authority = Authority(tmp_path / "authority")
    ops, alice = (authority.issue(name, host="DNS:client") for name in ("ops", "alice"))
    prefix = f"rights/{uuid4().hex}/"
    audit = tmp_path / "audit.jsonl"
    options = serving(authority.issue("proxy"), "--super-users=certificate:ops")
    with (
        proxy_process(cleared.uri, *options, f"--audit-file={audit}") as one,
        proxy_process(cleared.uri, *options) as two,
        open_namespace(one.location, tls=ops) as operator,
        open_namespace(one.location, tls=alice) as at_one,
        open_namespace(two.location, tls=alice) as at_two,
    ):
        at_one.create_log(f"{prefix}a")  # without a rule everybody may
        rule = f"allow certificate:alice read log {prefix}a"
        assert operator.change_access_rules(add=[rule]) == [rule]
        for namespace in (at_one, at_two):
            wait_until(partial(is_denied, namespace.get_access_rules), timeout_s=_TIME_S)
            assert is_denied(namespace.create_log, f"{prefix}b")
            assert is_denied(namespace.delete_log, f"{prefix}a")
            log = namespace.open_log(f"{prefix}a")
            assert log.read().to_arrow().num_rows == 0
            assert is_denied(append, log)
            assert is_denied(log.truncate, txid=1)
        assert at_one.get_logs(prefix) == [f"{prefix}a"]
        operator.change_access_rules(add=[f"allow certificate:alice append prefix {prefix}"])
        log = at_two.open_log(f"{prefix}a")
        wait_until(lambda: not is_denied(append, log), timeout_s=_TIME_S)
        assert [each.payload for each in log.open_reader().records()] == [b"x"]
        code, _, err = cleared.outcome(
            *("--uri", "", "--endpoint", two.location, "acl", "list"),
            *(f"--tls-{kind}={getattr(alice, kind)}" for kind in ("ca", "cert", "key")),
        )
        assert code == 1
        assert "certificate:alice may not manage the namespace: no rule allows it" in err
    cleared.text("audit", "verify", str(audit))
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert {"create", "access_rules"} <= {
        each["entrance"].partition("/")[2] for each in lines if each["result"] == "ok"
    }
    denied = [each for each in lines if "no rule allows it" in each["result"]]
    assert {each["principal"] for each in denied} == {"certificate:alice"}
    assert all(each["address"] == "127.0.0.1" for each in denied)
