"""Configuration: values that cannot work are refused when they are made, by key and rule."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from dlcore.autorecovery.config import AutoRecoveryConfig
from dlcore.config import LogSettings, QuorumConfig
from dlcore.errors import ConfigurationError


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
    """Of a kind that Python takes for a number, and the stored setting does not."""
    with pytest.raises(ConfigurationError, match=r"entry_bytes.*65536.*Expected `int"):
        LogSettings.of({"entry_bytes": np.int64(65536)})
    assert LogSettings.of({"entry_bytes": 65536}).entry_bytes == 65536


def test_a_quorum_takes_its_sizes_in_order() -> None:
    """As E, Qw and Qa are told everywhere; a wrong one is refused as one with a name."""
    assert QuorumConfig(5, 3, 2) == QuorumConfig(
        ensemble_size=5, write_quorum_size=3, ack_quorum_size=2
    )
    assert msgspec.msgpack.encode(QuorumConfig(5, 3, 2)) == msgspec.msgpack.encode([5, 3, 2])
    with pytest.raises(ConfigurationError, match="expected E >= Qw >= Qa"):
        QuorumConfig(2, 3, 2)
    wrong: Any = "3"
    with pytest.raises(ConfigurationError, match="write_quorum_size='3'"):
        QuorumConfig(3, wrong, 2)
