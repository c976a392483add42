"""Clients over an endpoint have the core's names: all but those that are listed here.

Whoever adds a public method or an argument to the core meets these lists: it is built over an
endpoint too, or put here, and on docs/clients.md with the reason.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import dlcore.sync
from dlcore import remote
from dlcore.api.manager import DistributedLogManager
from dlcore.api.namespace import Namespace
from dlcore.log.reading.reader import AsyncLogReader
from dlcore.log.writing.writer import AsyncLogWriter
from dlcore.remote import sync

PAGE = (Path(__file__).resolve().parents[3] / "docs/clients.md").read_text(encoding="utf-8")

INNER = {
    *(
        "clean_staging",
        "last_version",
        "ledgers",
        "list_staged",
        "log_context",
        "staging_owner",
        "tidied",
    ),
    *("abandon", "find_last", "fitted", "has_capacity", "ports", "unwritten"),
    *("verify", "write_fitted", "producers", "token", "after", "fresh", "log_id", "name", "uri"),
    *("last_dlsn", "log_name", "open_part", "followers", "tell_when_wanted"),
}
"""Of no use to those who reach proxies alone, there as an attribute, or for maintenance."""

PAIRS: list[tuple[Any, Any, str]] = [
    (
        Namespace,
        remote.RemoteNamespace,
        (
            "get_bookies get_ledger get_statistics list_commits list_ledgers list_logs survey_logs "
            "watch_logs"
        ),
    ),
    (
        DistributedLogManager,
        remote.RemoteLog,
        ("get_first_active_dlsn get_log_segments recover status update_schema watch_segments"),
    ),
    (AsyncLogReader, remote.RemoteReader, "broken_entries"),
    (AsyncLogWriter, remote.RemoteWriter, "config last_txid truncate"),
]
"""The core's face, the one over an endpoint, and what that lacks on purpose."""

BLOCKING = {
    Namespace: (dlcore.sync.Namespace, sync.RemoteNamespace),
    DistributedLogManager: (dlcore.sync.DistributedLogManager, sync.RemoteLog),
    AsyncLogReader: (dlcore.sync.LogReader, sync.RemoteReader),
    AsyncLogWriter: (dlcore.sync.LogWriter, sync.RemoteWriter),
}

ARGUMENTS = {
    "create_log": "config",
    "delete_log": "damaged",
    "open_log": "config",
    "open_reader": "skip_broken_entries ignore_truncation",
    "open_writer": "ledger_metadata",
    "read": "where",
}
"""Likewise of what they take."""


def public(face: Any) -> set[str]:
    """Return the public names of a class."""
    return {name for name in dir(face) if not name.startswith("_")}


def arguments(face: Any, name: str) -> set[str]:
    """Return the names of what a method takes; nothing of an attribute."""
    found = getattr(face, name)
    return set(inspect.signature(found).parameters) if callable(found) else set()


@pytest.mark.parametrize(("core", "other", "lacking"), PAIRS, ids=[p[0].__name__ for p in PAIRS])
def test_what_an_endpoint_lacks_is_listed(core: Any, other: Any, lacking: str) -> None:
    """Of the async faces, and no more than that of the blocking ones."""
    listed = set(lacking.split())
    assert public(core) - public(other) - INNER == listed
    blocking, blocking_other = BLOCKING[core]
    assert public(blocking) - public(blocking_other) - INNER <= listed
    for name in public(core) & public(other):
        missing = arguments(core, name) - arguments(other, name) - INNER
        assert missing == set(ARGUMENTS.get(name, "").split()), name


def test_the_page_of_clients_names_what_is_lacking() -> None:
    """So that nobody looks for it."""
    names = " ".join([*(lacking for _, _, lacking in PAIRS), *ARGUMENTS.values()]).split()
    assert [name for name in names if f"`{name}`" not in PAGE] == []
