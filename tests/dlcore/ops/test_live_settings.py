"""The settings that a cluster may have: known ones, with values in their ranges."""

from __future__ import annotations

import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.ops.cli.autorecovery import autorecovery_options
from dlcore.ops.live_settings import is_live, live_options, require_allowed
from dlcore.proxy.config import proxy_options


def test_they_are_those_that_the_programs_mark() -> None:
    """The page of configuration and the check are about the same ones."""
    for table, options in (("proxy", proxy_options()), ("autorecovery", autorecovery_options())):
        assert set(live_options()[table]) == {key for key, each in options.items() if each.live}
    assert is_live("proxy", "log_bytes_per_s")
    assert not is_live("proxy", "port")
    assert not is_live("bookie", "port")
    assert is_live("log", "retention_s")
    assert not is_live("log", "compression")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"proxy": {"port": 1}}, r"proxy\.port: no setting of a cluster, expected one of autorec"),
        ({"bookie": {"port": 1}}, r"bookie\.port: no setting of a cluster"),
        ({"proxy": {"bytes_per_s": "many"}}, "bytes_per_s='many'"),
        ({"proxy": {"window_bytes": 0}}, "window_bytes=0"),
        ({"proxy": {"staging_max": 1.5}}, r"staging_max=1\.5"),
        ({"log": {"retention_s": 0}}, "retention_s=0"),
        ({"log": {"retention_s": "7d"}}, "retention_s='7d'"),
        ({"log": {"compression": "lz4"}}, r"log\.compression: no setting of a cluster"),
        ({"proxy": {"bytes_per_s": -1.0}}, r"bytes_per_s=-1\.0"),
        ({"autorecovery": {"ledgers_at_once": 0}}, "ledgers_at_once=0"),
        ({"autorecovery": {"merge_fan_in": 1}}, "fan_in=1"),
    ],
)
def test_statements_that_are_refused(tables: dict[str, dict[str, object]], message: str) -> None:
    """Unknown ones, other kinds of values, and values out of range."""
    with pytest.raises(ConfigurationError, match=message):
        require_allowed(tables)


def test_statements_that_are_allowed() -> None:
    """Any number of them, of both programs."""
    require_allowed({})
    require_allowed(
        {
            "proxy": {"bytes_per_s": 1e6, "log_streams_max": 3},
            "autorecovery": {"copy_bytes_per_s": 5, "sweep_interval_s": 60.0},
            "log": {"retention_s": 604800, "explicit_truncation": True},
        }
    )
