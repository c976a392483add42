"""Options of a bookie: one flat table, parsed once, every mistake named."""

from __future__ import annotations

from pathlib import Path

import pytest

from bookie.config import GarbageConfig, SpaceConfig, StorageConfig
from bookie.server_config import BookieConfig, bookie_options
from dlcore.base.errors import ConfigurationError, InvalidNamespaceUriError
from tests.fixtures.certificates import Authority

REQUIRED = {"name": "b", "metadata_uri": "distributedlog://zk:2181/dlog", "data_dir": "/data"}


def test_text_and_typed_values_give_the_same_configuration() -> None:
    """The command line gives text, TOML gives types."""
    text = {"port": "7", "garbage_interval_s": "1.5", "garbage_age_ms": "9", "file_bytes_max": "99"}
    typed = {"port": 7, "garbage_interval_s": 1.5, "garbage_age_ms": 9, "file_bytes_max": 99}
    expected = BookieConfig(
        name="b",
        metadata_uri="distributedlog://zk:2181/dlog",
        data_dir=Path("/data"),
        port=7,
        garbage_interval_s=1.5,
        storage=StorageConfig(file_bytes_max=99, garbage=GarbageConfig(age_ms=9)),
    )
    assert BookieConfig.from_options({**REQUIRED, **text}) == expected
    assert BookieConfig.from_options({**REQUIRED, **typed}) == expected
    assert BookieConfig.from_options({**REQUIRED, "drain_timeout_s": 3}).drain_timeout_s == 3.0


def test_every_limit_can_be_set() -> None:
    """Set each option to its own default, as text: nothing changes, nothing is unknown."""
    options = {key: str(o.default) for key, o in bookie_options().items() if o.default is not None}
    assert BookieConfig.from_options({**options, **REQUIRED}) == BookieConfig.from_options(REQUIRED)
    assert {"compact_below_live_share", "compact_interval_s"} <= options.keys()
    assert {"garbage_brake_share", "space_minimum_bytes", "in_flight_bytes_max"} <= options.keys()
    assert bookie_options()["space_minimum_bytes"].default == SpaceConfig().minimum_bytes


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prot": 1}, "unknown option 'prot'"),
        ({"port": "x"}, "port='x'"),
        ({"port": 1.5}, "port=1.5"),
        ({"port": True}, "port=True"),
        ({"port": 65536}, "port=65536"),
        ({"advertised_port": -1}, "advertised_port=-1"),
        ({"name": 3}, "name=3"),
        ({"name": ""}, "name=''"),
        ({"name": "a\nb"}, "name="),
        ({"data_dir": 1}, "data_dir=1"),
        ({"session_timeout_s": 0}, "session_timeout_s=0"),
        ({"host": "0.0.0.0"}, "advertised_host"),
        ({"rack": ""}, "rack='': expected a name or a path like /region/rack"),
        ({"rack": "/"}, "rack='/': expected"),
        ({"rack": "/eu/"}, "rack='/eu/': expected"),
        ({"rack": "r 1"}, "rack='r 1': expected"),
        ({"rack": "r" * 129}, "128 characters at most"),
        ({"file_bytes_max": 0}, "file_bytes_max=0"),
        ({"garbage_brake_share": 2}, "brake_share=2"),
        ({"compact_below_live_share": 1}, "below_live_share=1"),
        ({"entry_size_bytes_max": 2**23}, "entry_size_bytes_max"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], named: str) -> None:
    """One mistake each: the message has the key and the value."""
    with pytest.raises(ConfigurationError, match=named):
        BookieConfig.from_options({**REQUIRED, **options})


@pytest.mark.parametrize("key", sorted(REQUIRED))
def test_a_missing_option_is_named(key: str) -> None:
    """Leave out each required one, which is named as it is spelled on the command line."""
    with pytest.raises(ConfigurationError, match=f"missing: --{key.replace('_', '-')}"):
        BookieConfig.from_options({k: v for k, v in REQUIRED.items() if k != key})


def test_all_missing_options_are_named_at_once() -> None:
    """An operator that starts a bookie need not try three times."""
    named = r"missing: --name, --metadata-uri \(or --uri, or \$DLOG_URI\), --data-dir"
    with pytest.raises(ConfigurationError, match=named):
        BookieConfig.from_options({})


def test_a_wrong_uri_is_refused_as_such() -> None:
    """Before anything is touched."""
    with pytest.raises(InvalidNamespaceUriError):
        BookieConfig.from_options({**REQUIRED, "metadata_uri": "zk:2181"})


def test_files_of_tls_are_read_at_once(tmp_path: Path) -> None:
    """A missing file is named before the start; clients need certificates by default."""
    issued = Authority(tmp_path).issue("bookie")
    files = {"tls_ca": issued.ca, "tls_cert": issued.cert, "tls_key": issued.key}
    config = BookieConfig.from_options({**REQUIRED, **files})
    assert config.tls == issued
    assert config.asks_clients
    assert not BookieConfig.from_options({**REQUIRED, "tls_client_auth": "none"}).asks_clients
    assert BookieConfig.from_options(REQUIRED).tls is None
    with pytest.raises(ConfigurationError, match=f"{tmp_path}/none"):
        BookieConfig.from_options({**REQUIRED, **files, "tls_ca": f"{tmp_path}/none"})
    with pytest.raises(ConfigurationError, match="tls_client_auth='maybe'"):
        BookieConfig.from_options({**REQUIRED, "tls_client_auth": "maybe"})
    named = {"tls_client_names": "*.example"}
    assert BookieConfig.from_options({**REQUIRED, **files, **named}).client_names.patterns
    for given in ({}, {**files, "tls_client_auth": "none"}):
        with pytest.raises(ConfigurationError, match=r"tls_client_names='\*.example'"):
            BookieConfig.from_options({**REQUIRED, **given, **named})


def test_settings_that_a_running_bookie_takes_over() -> None:
    """How it keeps house and what it tells; the rest is named with what was wanted."""
    old = BookieConfig.from_options({**REQUIRED, "garbage_age_ms": 5, "port": 7})
    assert BookieConfig.from_options(old.options) == old
    assert old.changed_to(old) == (old, {})
    wanted = {"scrub_bytes_per_second": 9, "log_level": "debug", "space_minimum_bytes": 3}
    changed, left = old.changed_to(BookieConfig.from_options({**REQUIRED, "port": 8, **wanted}))
    assert left == {"port": 8, "space_minimum_bytes": 3}
    assert (changed.port, changed.log_level) == (7, "debug")
    assert changed.storage.scrub.bytes_per_second == 9
    assert changed.storage.garbage == BookieConfig.from_options(REQUIRED).storage.garbage
    with pytest.raises(ConfigurationError, match="log_level='DEBUG': expected one of debug"):
        BookieConfig.from_options({**REQUIRED, "log_level": "DEBUG"})
