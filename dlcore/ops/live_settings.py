"""The settings that may be set for a whole cluster, and the check of their values; pure.

They are those whose `Option.live` says so: every process of the program takes them over while it
runs.  Those of the table `log` are what new logs get.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.base.config import NEW_LOG_SETTINGS, LogSettings
from dlcore.base.errors import ConfigurationError
from dlcore.base.settings import Option, config_of, options_of
from dlcore.ops.autorecovery import config as autorecovery
from dlcore.ops.autorecovery.config import AutoRecoveryConfig
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.proxy.config import LIVE_SETTINGS, ProxyConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

_NEW_LOGS = "log"
_MODELS: dict[str, tuple[type[Any], ...]] = {
    "proxy": (ProxyConfig,),
    "autorecovery": (AutoRecoveryConfig, UpkeepConfig),
}


def live_options() -> dict[str, dict[str, Option]]:
    """Return the settings that hold for a cluster, by the table of their program and their key."""
    found: dict[str, dict[str, Option]] = {}
    for table, models in _MODELS.items():
        options: dict[str, Option] = {}
        for model in models:
            options |= options_of(model, explained=False)
        found[table] = {key: option for key, option in options.items() if is_live(table, key)}
    return found | {_NEW_LOGS: _options_of_new_logs()}


def _options_of_new_logs() -> dict[str, Option]:
    unset = LogSettings()
    kinds = {"retention_s": float, "explicit_truncation": bool}
    return {key: Option(kinds[key], getattr(unset, key), "", live=True) for key in NEW_LOG_SETTINGS}


def is_live(table: str, key: str) -> bool:
    """Return whether a setting of a program holds for a cluster."""
    if table == "proxy":
        return key in LIVE_SETTINGS
    if table == _NEW_LOGS:
        return key in NEW_LOG_SETTINGS
    return table == "autorecovery" and autorecovery.is_live(key)


def require_allowed(tables: Mapping[str, Mapping[str, object]]) -> None:
    """Refuse settings that no process could use.

    Raises:
        ConfigurationError: a setting is unknown, or has a wrong type or value.
    """
    known = live_options()
    for table, values in tables.items():
        for key in values:
            if key not in known.get(table, {}):
                names = sorted(f"{name}.{each}" for name, keys in known.items() for each in keys)
                raise ConfigurationError(
                    f"{table}.{key}: no setting of a cluster, expected one of {', '.join(names)}"
                )
        if table == _NEW_LOGS:
            LogSettings.of(values)
        for model in _MODELS.get(table, ()):
            own = options_of(model, explained=False)
            config_of(model, {key: value for key, value in values.items() if key in own})
