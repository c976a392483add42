"""Settings of the programs: where they come from, what counts, what is refused, what is written.

Goal: an operator with a wrong setting learns where and what would be right, and the page that
    explains all settings is true.  Method: files and variables of each test's own, and the page
    made again.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from bookie.__main__ import _parser, _read_config
from bookie.config import (
    CompactionConfig,
    GarbageConfig,
    ScrubConfig,
    SpaceConfig,
    StorageConfig,
)
from bookie.server_config import BookieConfig
from dlcore.backends.direct import namespace
from dlcore.base import server_process
from dlcore.base.access.zookeeper import EVERYBODY, ZK_KEYS
from dlcore.base.config import (
    LedgerClientConfig,
    LogConfig,
    LogSettings,
    PlacementConfig,
    QuarantineConfig,
)
from dlcore.base.errors import ConfigurationError, DLError
from dlcore.base.settings import Option, field_texts, read_settings, variable_of
from dlcore.metadata.cluster_settings import ClusterSettingsStore
from dlcore.ops.cli import proxy
from dlcore.ops.cli.app import EXIT_FAILED, EXIT_USAGE, run
from dlcore.ops.cli.autorecovery import _serve, _ServiceConfig, autorecovery_options
from dlcore.ops.live_settings import require_allowed
from dlcore.proxy.config import ProxyConfig
from tests.fixtures.configuration_page import MODELS, PROGRAMS, page
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.made_parts import require_as_made
from tests.fixtures.memory_namespace import memory_cluster

ROOT = Path(__file__).resolve().parent.parent
URI = "distributedlog://127.0.0.1:1/dlog"
OF_PROGRAMS = (
    BookieConfig,
    CompactionConfig,
    GarbageConfig,
    ProxyConfig,
    ScrubConfig,
    SpaceConfig,
    StorageConfig,
)
"""Configurations whose fields are on the page as settings of a program."""
REQUIRED: dict[type, dict[str, Any]] = {
    BookieConfig: {"name": "b", "metadata_uri": URI, "data_dir": Path("b")}
}
OPTIONS = {"port": Option(int, 0, "A port."), "name": Option(str, None, "A name.")}


def test_the_page_is_that_of_the_code() -> None:
    """`make pages` was run after the last change."""
    require_as_made(ROOT / "docs" / "configuration.md", page())


def test_every_setting_is_explained() -> None:
    """In words."""
    for options in PROGRAMS.values():
        assert [key for key, option in options.items() if not option.text] == []
    for model in (LogSettings, *MODELS):
        assert field_texts(model).keys() == set(model.__annotations__), model


def test_every_setting_is_read() -> None:
    """By an attribute of its name, outside the checks of its own class."""
    models, reads = (LogSettings, *MODELS, *OF_PROGRAMS), _Reads()
    unread = {key for model in models for key in model.__annotations__}
    for path in (each for name in ("dlcore", "bookie") for each in (ROOT / name).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(f".{key}" in text for key in unread):
            reads.visit(ast.parse(text))
            unread -= reads.names
    # By `getattr`, with `ZK_KEYS` and with f"{scope}records_per_s".
    scopes, units = ("stream", "log", "principal"), ("records", "bytes")
    assert unread == {*ZK_KEYS, *(f"{scope}_{unit}_per_s" for scope in scopes for unit in units)}


class _Reads(ast.NodeVisitor):
    """The names of attributes that code reads, except where it only checks them."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not re.match("__post_init__|_require_", node.name):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.names.add(node.attr)
        self.generic_visit(node)


def test_every_configuration_is_on_the_page() -> None:
    """A new one fails here until it is listed: as a program's table, or as a model in Python."""
    known = {model.__name__ for model in (LogSettings, *MODELS, *OF_PROGRAMS)}
    found = {
        name
        for package in ("dlcore", "bookie", "dlspark")
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"^class ([A-Z]\w*(?:Config|Policy))\b", path.read_text(), re.M)
    }
    assert found | {"LogSettings"} == known


@pytest.mark.parametrize("model", [LogSettings, *MODELS, *OF_PROGRAMS])
def test_wrong_keys_and_values_are_named_when_a_configuration_is_built(model: type) -> None:
    """With the keys that there are, or with what would be right."""
    name, *_ = model.__annotations__
    with pytest.raises(ConfigurationError, match=rf"colour=1: {model.__name__} has {name}\b"):
        model(colour=1)
    for key in model.__annotations__:
        others: tuple[Any, ...] = (True, None, "5", 5)
        for value in others:
            with contextlib.suppress(ConfigurationError):  # nothing else
                model(**REQUIRED.get(model, {}) | {key: value})
        with pytest.raises(ConfigurationError, match=rf"^{key}=\[\]: expected "):
            model(**{key: []})


@pytest.mark.parametrize("model", [LogSettings, *MODELS, *OF_PROGRAMS])
def test_no_number_is_negative(model: type) -> None:
    """A new one is among those that `__post_init__` checks, as by `require_not_negative`."""
    taken = set(model.__annotations__)
    for key in model.__annotations__:
        try:
            model(**REQUIRED.get(model, {}) | {key: -1})
        except ConfigurationError:
            taken.remove(key)
    assert not taken, f"{model.__name__}.__post_init__ has to refuse -1 for these"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"entry_bytes": "5"}, "entry_bytes='5': expected a whole number"),
        ({"entry_bytes": 5.0}, "entry_bytes=5.0: expected a whole number"),
        ({"entry_bytes": True}, "entry_bytes=True: expected a whole number"),
        ({"lock_timeout_s": None}, "lock_timeout_s=None: expected a number"),
        ({"lock_enabled": 1}, "lock_enabled=1: expected True or False"),
        ({"compression": 3}, "compression=3: expected text"),
        ({"quorum": "3/3/2"}, "quorum='3/3/2': expected QuorumConfig"),
    ],
)
def test_values_of_the_wrong_kind(values: dict[str, Any], reason: str) -> None:
    """None is taken for another one, but a whole number for any number."""
    with pytest.raises(ConfigurationError, match=reason):
        LogConfig(**values)
    with pytest.raises(ConfigurationError, match=reason):
        replace(LogConfig(), **values)
    assert LogConfig(lock_timeout_s=5, entry_bytes=5).lock_timeout_s == 5
    with pytest.raises(ConfigurationError, match="retention_s='x': expected a number or None"):
        LogSettings(retention_s="x")  # type: ignore[arg-type]


def settings(
    tmp_path: Path, text: str, environment: dict[str, str], table: str = "bookie"
) -> dict[str, object]:
    """Read a table of a file with this text, and variables."""
    file = tmp_path / "dlog.toml"
    file.write_text(text)
    return read_settings(table, OPTIONS, file=str(file), environment=environment)


def test_a_variable_counts_before_the_file(tmp_path: Path) -> None:
    """Key by key; other tables and other programs' variables are theirs."""
    text = '[bookie]\nport = 1\nname = "f"\n[autorecovery]\nport = 9\n'
    environment = {"DLOG_BOOKIE_PORT": "2", "DLOG_AUTORECOVERY_PORT": "3", "HOME": "/"}
    assert settings(tmp_path, text, environment) == {"port": 2, "name": "f"}
    assert settings(tmp_path, text, {}, "autorecovery") == {"port": 9}
    assert settings(tmp_path, text, {"DLOG_PORT": "7", "DLOG_X": ""}, "dlog") == {"port": 7}
    assert read_settings("bookie", OPTIONS, file=None, environment={}) == {}
    by_variable = {"DLOG_CONFIG": str(tmp_path / "dlog.toml")}
    found = read_settings("bookie", OPTIONS, file=None, environment=by_variable)
    assert found == {"port": 1, "name": "f"}
    assert variable_of("dlog", "uri") == "DLOG_URI"


@pytest.mark.parametrize(
    ("text", "environment", "reason"),
    [
        ("[bookie]\nprot = 1", {}, "[bookie] prot=1: there is no such setting, expected one of"),
        ("[bookie]\nport = 'x'", {}, "[bookie] port='x': expected a whole number"),
        ("[bookie]\nport = true", {}, "[bookie] port=True: expected a whole number"),
        ("[bookie]\nport = 1.5", {}, "[bookie] port=1.5: expected a whole number"),
        ("[bookie]\nname = 3", {}, "[bookie] name=3: expected text"),
        ("port = 1", {}, "unknown 'port', expected the tables [dlog], [bookie], [autorecovery]"),
        ("[booky]", {}, "unknown 'booky', expected the tables"),
        ("[bookie", {}, "dlog.toml: "),
        ("", {"DLOG_BOOKIE_PROT": "1"}, "$DLOG_BOOKIE_PROT='1': there is no such setting"),
        ("", {"DLOG_BOOKIE_PORT": "x"}, "$DLOG_BOOKIE_PORT='x': expected a whole number"),
    ],
)
def test_a_mistake_is_named_with_its_place(
    tmp_path: Path, text: str, environment: dict[str, str], reason: str
) -> None:
    """File or variable, the value, and what could stand there."""
    with pytest.raises(ConfigurationError) as caught:
        settings(tmp_path, text, environment)
    assert reason in str(caught.value)
    if not environment:
        assert str(tmp_path) in str(caught.value)


def test_a_bookie_takes_line_variable_file_and_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order."""
    file = tmp_path / "dlog.toml"
    file.write_text('[bookie]\nname = "f"\ndata_dir = "/f"\nport = 1\ngarbage_age_ms = 5\n')
    monkeypatch.setenv("DLOG_CONFIG", str(file))
    monkeypatch.setenv("DLOG_URI", URI)
    monkeypatch.setenv("DLOG_BOOKIE_PORT", "2")
    monkeypatch.setenv("DLOG_BOOKIE_DATA_DIR", "/v")
    options = vars(_parser().parse_args(["--port", "3"]))
    options.pop("watch_parent")
    config = _read_config(options)
    assert (config.port, config.data_dir, config.name) == (3, Path("/v"), "f")
    assert config.metadata_uri == URI
    assert config.storage.garbage.age_ms == 5


def test_a_bookie_that_the_command_runs_takes_what_the_command_was_given(tmp_path: Path) -> None:
    """The file, and the namespace."""
    file = tmp_path / "dlog.toml"
    file.write_text('[dlog]\nuri = "nonsense"\n[bookie]\nname = "b"\ndata_dir = "/nowhere"\n')
    command = [sys.executable, "-m", "dlcore.ops.cli", "--config", str(file), "bookie", "run"]
    environment = {key: value for key, value in os.environ.items() if "DLOG" not in key}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=60
    )
    assert done.returncode == EXIT_USAGE
    assert "bookie refuses to start: invalid namespace URI 'nonsense'" in done.stderr


def test_the_command_takes_its_namespace_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable counts before it, the command line before both."""
    monkeypatch.delenv("DLOG_URI", raising=False)
    file = tmp_path / "dlog.toml"
    file.write_text('[dlog]\nuri = "of-the-file"\n[autorecovery]\naudit_interval_s = 0\n')
    command = ["--config", str(file), "log", "list"]

    def printed(*more: str) -> str:
        assert run([*command, *more]) == EXIT_USAGE
        return capsys.readouterr().err

    assert "'of-the-file'" in printed()
    monkeypatch.setenv("DLOG_URI", "of-the-variable")
    assert "'of-the-variable'" in printed()
    assert "'of-the-line'" in printed("--uri", "of-the-line")
    command = ["log", "list", "--config", str(file)]
    assert "'of-the-variable'" in printed()
    monkeypatch.delenv("DLOG_URI")
    assert "'of-the-file'" in printed()
    command = ["--config", str(file), "log", "list"]
    command[2:] = ["autorecovery", "run"]
    assert "audit_interval_s=0.0: expected a number > 0" in printed()
    monkeypatch.setenv("DLOG_AUTORECOVERY_AUDIT_INTERVAL_S", "-1")
    assert "audit_interval_s=-1.0" in printed()
    assert "audit_interval_s=-2.0" in printed("--audit-interval-s", "-2")
    file.write_text('[dlog]\nendpoint = "of-the-file"\n')
    command = ["--config", str(file), "log", "list"]
    assert "endpoint 'of-the-file'" in printed()
    assert "'of-the-line'" in printed("--uri", "of-the-line")  # and no endpoint
    file.write_text("[dlog]\nurl = 1\n")
    assert "url=1: there is no such setting, expected one of encryption_keys, endpoint" in printed()
    command += ["--config", str(tmp_path / "none")]
    assert f"{tmp_path}/none" in printed()


CLIENT_FILE = """
[ledger_client]
add_timeout_s = 30
quarantine_failures_min = 7
placement_enforce_racks = true
"""
CLIENT_PROGRAMS = ("log list", "log write clicks", "autorecovery run", "proxy run")


@pytest.mark.parametrize("command", CLIENT_PROGRAMS)
def test_programs_take_how_bookies_are_talked_to(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From a table of its own, parts by their names before; variables count before the file."""
    taken: list[LedgerClientConfig] = []

    async def open_namespace(uri: str, *, client_config: LedgerClientConfig, **_: object) -> None:
        taken.append(client_config)
        raise DLError("not now")

    monkeypatch.setattr(namespace, "open_namespace", open_namespace)
    monkeypatch.setattr(server_process, "keep_what_is_freed", lambda: None)
    monkeypatch.setenv("DLOG_URI", URI)
    monkeypatch.setenv("DLOG_LEDGER_CLIENT_READ_TIMEOUT_S", "40")
    monkeypatch.setenv("DLOG_LEDGER_CLIENT_QUARANTINE_FAILURES_MIN", "8")
    file = tmp_path / "dlog.toml"
    file.write_text(CLIENT_FILE)
    with caplog.at_level(logging.WARNING):  # which a program changes
        assert run(["--config", str(file), *command.split()]) == EXIT_FAILED
    assert taken == [
        LedgerClientConfig(
            add_timeout_s=30.0,
            read_timeout_s=40.0,
            placement=PlacementConfig(enforce_racks=True),
            quarantine=QuarantineConfig(failures_min=8),
        )
    ]


@pytest.mark.parametrize("command", CLIENT_PROGRAMS)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("add_timeout_s = 0", "add_timeout_s=0.0: expected a number > 0"),
        ("add_timeout = 3", "[ledger_client] add_timeout=3: there is no such setting"),
        ("placement_enforce_racks = 1", "placement_enforce_racks=1: expected true or false"),
        ("placement_enforce_racks = 'on'", "placement_enforce_racks='on': expected true or false"),
        ("quarantine_failure_share = true", "failure_share=True: expected a number"),
    ],
)
def test_programs_refuse_what_no_client_can_be(
    command: str,
    text: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is asked."""
    monkeypatch.setenv("DLOG_URI", URI)
    file = tmp_path / "dlog.toml"
    file.write_text(f"[ledger_client]\n{text}\n")
    assert run(["--config", str(file), *command.split()]) == EXIT_USAGE
    assert reason in capsys.readouterr().err


def test_each_setting_of_autorecovery_counts() -> None:
    """For one thing; said as it is by default, it changes nothing."""
    known = _ServiceConfig.of({}, LedgerClientConfig())
    others: set[_ServiceConfig] = set()
    for key, option in autorecovery_options().items():
        assert _ServiceConfig.of({key: option.default}, known.client) == known
        other: object = "s3://bucket/logs" if key in {"tier", "export"} else "debug"
        if option.kind is not str:
            other = 2 * option.default  # type: ignore[operator]
        others.add(_ServiceConfig.of({"merge_run_weight_max": 2**27, key: other}, known.client))
    assert len(others - {known}) == len(autorecovery_options())


def test_a_proxy_takes_line_variable_and_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In this order; its own TLS files have names of their own on the command line."""
    taken: list[ProxyConfig] = []

    async def serve(_: str, config: ProxyConfig, *__: object) -> None:
        taken.append(config)

    monkeypatch.setattr(proxy, "_serve", serve)
    monkeypatch.setattr(server_process, "keep_what_is_freed", lambda: None)
    monkeypatch.setenv("DLOG_PROXY_LOGS_MAX", "6")
    monkeypatch.setenv("DLOG_PROXY_CALLS_MAX", "7")
    file = tmp_path / "dlog.toml"
    file.write_text("[proxy]\nlogs_max = 1\ncalls_max = 2\nstaging_max = 3\n")
    command = ["--config", str(file), "proxy", "run", "--uri", URI, "--calls-max", "8"]
    level = logging.getLogger().level
    assert run([*command, "--serve-tls-cert", "c.pem", "--host", "127.0.0.1"]) == 0
    logging.getLogger().setLevel(level)
    assert taken == [ProxyConfig(logs_max=6, calls_max=8, staging_max=3, tls_cert="c.pem")]


def test_bookies_take_how_others_are_talked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same table; what differs later needs a restart."""
    file = tmp_path / "dlog.toml"
    file.write_text(f'[bookie]\nname = "b"\ndata_dir = "/d"\n{CLIENT_FILE}')
    monkeypatch.setenv("DLOG_URI", URI)
    monkeypatch.setenv("DLOG_LEDGER_CLIENT_QUARANTINE_FAILURES_MIN", "8")
    config = _read_config({"config": str(file)})
    assert config.ledger_client == LedgerClientConfig(
        add_timeout_s=30.0,
        placement=PlacementConfig(enforce_racks=True),
        quarantine=QuarantineConfig(failures_min=8),
    )
    monkeypatch.setenv("DLOG_LEDGER_CLIENT_READ_TIMEOUT_S", "2")
    kept, left = config.changed_to(_read_config({"config": str(file)}))
    assert (kept, left) == (config, {"ledger_client_read_timeout_s": 2.0})
    monkeypatch.setenv("DLOG_LEDGER_CLIENT_READ_TIMEOUT_S", "0")
    with pytest.raises(ConfigurationError, match=r"read_timeout_s=0.0: expected a number > 0"):
        _read_config({"config": str(file)})
    file.write_text("[bookie]\nledger_client_read_timeout_s = 2\n")
    with pytest.raises(ConfigurationError, match="there is no such setting"):
        _read_config({"config": str(file)})


def test_autorecovery_talks_to_bookies_anew_when_it_is_to_do_so_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On SIGHUP, and of its cluster; for what else has changed its namespace stays open."""
    known = _ServiceConfig.of({}, LedgerClientConfig())
    opened: list[LedgerClientConfig] = []
    given: dict[str, object] = {}
    out = ""

    def read() -> _ServiceConfig:
        return replace(known, recovery=replace(known.recovery, **given))  # type: ignore[arg-type]

    async def until_at_work(times: int) -> None:
        nonlocal out
        while out.count("at work") < times:
            await asyncio.sleep(0.01)
            out += capsys.readouterr().out

    async def scenario() -> None:
        nonlocal known
        async with memory_cluster() as cluster:

            async def open_namespace(_: str, *, client_config: Any, **__: Any) -> Any:
                opened.append(client_config)
                return await cluster.open(f"service-{len(opened)}")

            monkeypatch.setattr(namespace, "open_namespace", open_namespace)
            serving = asyncio.create_task(_serve("memory", None, EVERYBODY, read, given))
            await until_at_work(1)
            known = _ServiceConfig.of({"audit_interval_s": 5.0}, known.client)
            os.kill(os.getpid(), signal.SIGHUP)
            await until_at_work(2)
            assert opened == [LedgerClientConfig()]
            known = replace(known, client=LedgerClientConfig(add_timeout_s=30))
            os.kill(os.getpid(), signal.SIGHUP)
            await until_at_work(3)
            assert opened == [LedgerClientConfig(), known.client]
            ports = cluster.namespaces[-1].ports
            settings = ClusterSettingsStore(ports.store, ports.paths)
            await settings.change({("autorecovery", "audit_interval_s"): 7.0}, require_allowed)
            await until_at_work(4)
            assert given == {"audit_interval_s": 7.0}
            os.kill(os.getpid(), signal.SIGTERM)
            await serving

    with click.Context(click.Command("run"), obj={"config": "dlog.toml"}):
        run_in_own_time(asyncio.wait_for(scenario(), 60))
