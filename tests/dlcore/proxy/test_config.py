"""The settings of a proxy: each has a meaning, and values that cannot be are named."""

from __future__ import annotations

import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.proxy.config import ProxyConfig, proxy_options


def test_each_setting_is_an_option_with_words() -> None:
    """The defaults are those of the class."""
    options = proxy_options()
    assert options["message_bytes_max"].default == ProxyConfig().message_bytes_max
    assert all(option.text for option in options.values())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", 65536),
        ("advertised_port", -1),
        ("host", ""),
        ("host", "0.0.0.0"),
        ("window_records", 0),
        ("window_bytes", -5),
        ("lock_timeout_s", -0.1),
        ("log_level", "loud"),
    ],
)
def test_a_value_that_cannot_be_is_refused(key: str, value: object) -> None:
    """The error names the key and the value."""
    with pytest.raises(ConfigurationError, match=f"{key}={value!r}"):
        ProxyConfig(**{key: value})  # type: ignore[arg-type]


def test_a_proxy_that_listens_everywhere_says_where_it_is() -> None:
    """Else others would send clients to no address."""
    assert ProxyConfig(host="0.0.0.0", advertised_host="a.example").advertised_port == 0


def test_locations() -> None:
    """The address for clients: another host or port where it is set, with brackets around IPv6."""
    assert ProxyConfig(port=4190).location(4190) == "grpc://127.0.0.1:4190"
    assert ProxyConfig(host="::1").location(5) == "grpc://[::1]:5"
    assert ProxyConfig(host="[::1]", port=7).address == "[::1]:7"
    everywhere = ProxyConfig(host="::", advertised_host="fd00::1", advertised_port=8)
    assert everywhere.location(5) == "grpc://[fd00::1]:8"


def test_only_the_level_of_the_log_changes_while_a_proxy_runs() -> None:
    """The other new settings wait for a restart, and are named with their values."""
    old = ProxyConfig(log_level="info", port=1)
    assert old.changed_to(old) == (old, {})
    changed, left = old.changed_to(ProxyConfig(log_level="debug", port=2))
    assert changed == ProxyConfig(log_level="debug", port=1)
    assert left == {"port": 2}
