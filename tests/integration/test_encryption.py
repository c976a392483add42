"""Encryption at rest with real processes: bookies never have a record, and keys change at work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pytest

from dlcore.base.errors import EncryptionKeyError
from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.encrypted import write_keys
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.pages import blocks_of
from tests.fixtures.proxies import proxy_process
from tests.fixtures.shell import Shell
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import Namespace

pytestmark = pytest.mark.integration

SECRET = b"a-word-without-readers"
OPEN = b"a-word-for-everybody"
WAIT_S = 60
ACK_QUORUM = 2
NOW_MS = 2**42
"""A transaction id after those that an append gives, which are times."""


def files_with(word: bytes, folder: Path) -> list[str]:
    """Return the files below a folder whose bytes have the word."""
    found = []
    for path in (Path(at, name) for at, _, names in os.walk(folder) for name in names):
        with suppress(FileNotFoundError):  # bookies at work remove files
            if word in path.read_bytes():
                found.append(path.name)
    return sorted(found)


def written(namespace: Namespace, log: str, word: bytes, count: int) -> None:
    """Write records by a writer, and one more by an atomic append."""
    if count > 1:
        with namespace.open_log(log) as manager, manager.open_writer() as writer:
            for number in range(count - 1):
                writer.write(LogRecord(number, b"%s %d" % (word, number)))
                writer.flush()
    with namespace.begin_append(f"job/{log}", 1) as append:
        append.write_batch(log, pa.record_batch({"value": [b"%s %d" % (word, count - 1)]}))
        append.commit()


def payloads(namespace: Namespace, log: str) -> list[bytes]:
    """Return all there is."""
    with namespace.open_log(log) as manager, manager.open_reader() as reader:
        return [record.payload for record in reader]


def test_a_proxy_without_keys_says_so(sandbox: Sandbox, tmp_path: Path) -> None:
    """To readers, writers and appends; none of it is tried until patience ends."""
    where, log = write_keys(tmp_path / "keys", "k"), f"keyless/{uuid4().hex}"
    with ExitStack() as stack:
        namespace = stack.enter_context(open_namespace(sandbox.uri, encryption_keys=where))
        namespace.create_log(log)
        namespace.open_log(log).update_settings(encrypted=True)
        written(namespace, log, SECRET, 2)
        proxy = stack.enter_context(proxy_process(sandbox.uri))
        remote = stack.enter_context(open_namespace(proxy.location))
        with pytest.raises(
            EncryptionKeyError, match=f"log '{log}' is encrypted, here with the key"
        ):
            payloads(remote, log)
        for count in (1, 2):
            with pytest.raises(EncryptionKeyError, match=f"log '{log}' has the setting encrypted"):
                written(remote, log, SECRET, count)


def test_bookies_have_no_record_and_upkeep_no_key(
    fresh_sandbox: Callable[..., Sandbox],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writers and readers of every kind, through a proxy, too; a dead one is recovered without."""
    cluster, keys = fresh_sandbox(3), tmp_path / "keys"
    uri, where, shell = cluster.uri, str(keys), Shell(cluster.uri, capsys)
    follow_the_page(uri, keys)
    shell.text("log", "create", "clear")
    expected = [b"%s %d" % (SECRET, number) for number in range(5)]
    folders = [each for each in cluster.data_dir.glob("bookie-*") if each.is_dir()]
    assert len(folders) == 3
    with ExitStack() as stack:
        namespace = stack.enter_context(open_namespace(uri, encryption_keys=where))
        written(namespace, "clear", OPEN, 5)
        written(namespace, "clicks", SECRET, 5)
        assert payloads(namespace, "clicks") == expected
        bare = stack.enter_context(open_namespace(uri))
        with pytest.raises(EncryptionKeyError, match="log 'clicks' has the setting encrypted"):
            written(bare, "clicks", OPEN, 2)
        exit_code, out, output = shell.outcome("log", "dump", "clicks")
        assert (exit_code, out) == (1, "")
        assert (
            "log 'clicks' is encrypted, here with the key '2026-11', and there are no keys"
            in output
        )
        monkeypatch.setenv("DLOG_ENCRYPTION_KEYS", where)
        assert SECRET.decode() in shell.text("log", "dump", "clicks")
        shell.text("log", "copy", "clicks", "copied", "--create")
        assert payloads(namespace, "copied") == expected
        monkeypatch.delenv("DLOG_ENCRYPTION_KEYS")

        proxy = stack.enter_context(proxy_process(uri, "--encryption-keys", where))
        remote = stack.enter_context(open_namespace(proxy.location))
        with remote.open_log("clicks").open_writer() as writer:

            def uses(key: bytes) -> bool:
                """Write one more record, and return whether any is encrypted with the key."""
                expected.append(b"%s %d" % (SECRET, len(expected)))
                writer.write(LogRecord(len(expected) + NOW_MS, expected[-1]))
                writer.flush()
                return all(files_with(key, folder) for folder in folders)

            wait_until(lambda: uses(b"2026-11"), timeout_s=WAIT_S)  # two of three acknowledge
            assert not uses(b"later-key")
            write_keys(keys, "later-key", others=keys.read_text())
            wait_until(lambda: uses(b"later-key"), timeout_s=WAIT_S)
        assert payloads(remote, "clicks") == expected
        assert payloads(namespace, "clicks") == expected
        die_writing(uri, where)
        expected.append(SECRET)
        shell.text("log", "repair", "clicks", "--yes")
        assert payloads(namespace, "clicks") == expected
        assert shell.json("log", "inspect", "clicks", "--entries") == []
        for ledger in shell.json("ledger", "list"):
            assert copies(shell, str(ledger["ledger"])) >= ACK_QUORUM
    assert files_with(SECRET, cluster.data_dir) == []
    assert all(files_with(OPEN, folder) for folder in folders)


def follow_the_page(uri: str, keys: Path) -> None:
    """Make the file of keys, and the log "clicks", as docs/encryption.md tells, twice."""
    (block,) = blocks_of("docs/encryption.md")
    lines = (2 * block.text).replace("/etc/dlog/encryption-keys", str(keys))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"DLOG_URI": uri, "PATH": path}
    subprocess.run(["bash", "-ec", lines], env=environment, check=True, capture_output=True)
    assert keys.stat().st_mode & 0o77 == 0


def copies(shell: Shell, ledger: str) -> int:
    """Return on how many bookies each part of a ledger is whole, at least.

    A bookie that a writer did not wait for may lack the last entries; an empty ledger lacks none.
    """
    _, out, err = shell.outcome("ledger", "check", ledger, "--json")
    assert err == ""
    whole: Counter[int] = Counter()
    for row in json.loads(out)["replicas"]:
        assert row["state"] in {"holds", "misses"}, row
        whole[row["first_entry"]] += row["state"] == "holds"
    return min(whole.values(), default=ACK_QUORUM)


def die_writing(uri: str, where: str) -> None:
    """Run a process that writes a record, and ends without closing anything."""
    program = f"""
import os
from dlcore import LogRecord
from dlcore.sync import open_namespace
namespace = open_namespace({uri!r}, encryption_keys={where!r})
writer = namespace.open_log("clicks").open_writer()
writer.write(LogRecord({2 * NOW_MS}, {SECRET!r}))
writer.flush()
os._exit(7)
"""
    done = subprocess.run([LOADED_PYTHON, "-c", program], cwd=REPOSITORY, check=False)
    assert done.returncode == 7
