"""Configuration: values that cannot work are refused when they are made, by key and rule."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest

from bookie.config import (
    CompactionConfig,
    GarbageConfig,
    ScrubConfig,
    SpaceConfig,
    StorageConfig,
)
from bookie.server_config import BookieConfig
from dlcore.base.config import (
    SECONDS_MAX,
    LedgerClientConfig,
    LogConfig,
    LogSettings,
    PlacementConfig,
    QuarantineConfig,
    QuorumConfig,
)
from dlcore.base.errors import ConfigurationError, CorruptMetadataError
from dlcore.base.settings import config_of, options_of, read_settings
from dlcore.log.metadata.values import StoredSettings
from dlcore.metadata.stored import LAYOUT, decode
from dlcore.ops.autorecovery.config import AutoRecoveryConfig
from dlcore.ops.upkeep.config import MergePolicy, UpkeepConfig
from dlcore.proxy.config import ProxyConfig


def test_a_replication_factor_asks_every_bookie_for_every_entry() -> None:
    """N/N/N."""
    assert QuorumConfig.of_replication_factor(4) == QuorumConfig(
        ensemble_size=4, write_quorum_size=4, ack_quorum_size=4
    )
    with pytest.raises(ConfigurationError, match="'0/0/0': expected E >= Qw >= Qa >= 1"):
        QuorumConfig.of_replication_factor(0)


@pytest.mark.parametrize("quorum", [(2, 3, 2), (3, 2, 3), (3, 3, 0)])
def test_quorums_that_contradict_each_other_are_refused(quorum: tuple[int, int, int]) -> None:
    """All three are named."""
    size, write, ack = quorum
    with pytest.raises(ConfigurationError, match=f"'{size}/{write}/{ack}': expected E >= Qw >= Qa"):
        QuorumConfig(ensemble_size=size, write_quorum_size=write, ack_quorum_size=ack)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("lost_bookie_delay_s", -1.0, "expected a number >= 0"),
        ("open_ledger_grace_s", -0.1, "expected a number >= 0"),
        ("audit_interval_s", 0.0, "expected a number > 0"),
        ("copy_bytes_in_flight", 0, "expected a number > 0"),
        ("ledgers_at_once", -4, "expected a number > 0"),
        ("retry_pause_s_max", 0.0, "expected a number > 0"),
    ],
)
def test_auto_recovery_that_could_not_work_is_refused(key: str, value: float, rule: str) -> None:
    """A delay may be nothing, a pace or a size may not."""
    arguments: dict[str, Any] = {key: value}
    with pytest.raises(ConfigurationError, match=f"{key}={value}: {rule}"):
        AutoRecoveryConfig(**arguments)
    assert AutoRecoveryConfig(lost_bookie_delay_s=0.0).lost_bookie_delay_s == 0.0


def test_a_number_that_cannot_be_stored_is_refused() -> None:
    """A value that Python takes for a number, and the stored setting does not."""
    with pytest.raises(ConfigurationError, match=r"entry_bytes.*65536.*Expected `int"):
        LogSettings.of({"entry_bytes": np.int64(65536)})
    assert LogSettings.of({"entry_bytes": 65536}).entry_bytes == 65536


MODELS = [
    AutoRecoveryConfig,
    BookieConfig,
    LedgerClientConfig,
    LogConfig,
    MergePolicy,
    PlacementConfig,
    ProxyConfig,
    QuarantineConfig,
    StorageConfig,
    CompactionConfig,
    GarbageConfig,
    ScrubConfig,
    SpaceConfig,
    UpkeepConfig,
]
EXTREMES = [1e308, -1e308, math.inf, -math.inf, math.nan, 2**63, 10**400]


def numbers_of(model: Any) -> list[str]:
    """Return the settings of a model that are numbers."""
    hints = get_type_hints(model)
    return [
        key for key, kind in hints.items() if not {int, float}.isdisjoint({kind, *get_args(kind)})
    ]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("value", EXTREMES, ids=[str(value)[:6] for value in EXTREMES])
def test_no_setting_takes_a_number_beyond_all_reason(model: Any, value: float) -> None:
    """Each names itself, and what it may be at most."""
    given = {"name": "a", "metadata_uri": "distributedlog://a:1/dlog", "data_dir": Path("/a")}
    needed = {key: given[key] for key in given if model is BookieConfig}
    for key in numbers_of(model):
        if (model, key, value) == (LogConfig, "reader_idle_error_s", math.inf):
            continue  # never
        with pytest.raises(ConfigurationError, match=f"^{key}="):
            model(**needed, **{key: value})


@pytest.mark.parametrize("value", EXTREMES, ids=[str(value)[:6] for value in EXTREMES])
@pytest.mark.parametrize("key", numbers_of(LogSettings))
def test_no_log_is_given_a_setting_beyond_all_reason(key: str, value: float) -> None:
    """Neither by a program, nor by what is stored, nor by what a client sends."""
    with pytest.raises(ConfigurationError, match=f"^{key}="):
        LogSettings(**{key: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=f"^{key}="):
        LogSettings().changed({key: value})
    stored = json.dumps({"layout": LAYOUT, "settings": {key: value}}).encode()
    with pytest.raises(CorruptMetadataError):
        decode(StoredSettings, stored, source="/a")
    assert LogSettings(retention_s=SECONDS_MAX).retention_s == SECONDS_MAX


def test_a_file_and_a_variable_give_no_number_beyond_all_reason(tmp_path: Path) -> None:
    """They say which."""
    for text in ("1e308", "inf", "nan"):
        file = tmp_path / "dlog.toml"
        file.write_text(f"[autorecovery]\ncheck_interval_s = {text}\n")
        options = options_of(AutoRecoveryConfig)
        for path, environment in (
            (str(file), {}),
            (None, {"DLOG_AUTORECOVERY_CHECK_INTERVAL_S": text}),
        ):
            values = read_settings("autorecovery", options, file=path, environment=environment)
            with pytest.raises(ConfigurationError, match="check_interval_s="):
                config_of(AutoRecoveryConfig, values)


def test_a_quorum_takes_its_sizes_in_order() -> None:
    """As E, Qw and Qa are given everywhere; a wrong one is refused as one with a name."""
    assert QuorumConfig(5, 3, 2) == QuorumConfig(
        ensemble_size=5, write_quorum_size=3, ack_quorum_size=2
    )
    assert msgspec.msgpack.encode(QuorumConfig(5, 3, 2)) == msgspec.msgpack.encode([5, 3, 2])
    with pytest.raises(ConfigurationError, match="expected E >= Qw >= Qa"):
        QuorumConfig(2, 3, 2)
    wrong: Any = "3"
    with pytest.raises(ConfigurationError, match="write_quorum_size='3'"):
        QuorumConfig(3, wrong, 2)
