"""The settings of its cluster that a running proxy takes over."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from dlcore.metadata.cluster_settings import ClusterSettingsStore
from dlcore.proxy.config import LIVE_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlcore.metadata.cluster_settings import Value
    from dlcore.metadata.following import NodeFollower
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore
    from dlcore.proxy.config import ProxyConfig

logger = logging.getLogger(__name__)


class LiveSettings:
    """The configuration of a proxy, with the settings of its cluster.

    Args:
        given: what the proxy was started with.
        parts: called with each new configuration.
    """

    def __init__(self, given: ProxyConfig, *parts: Callable[[ProxyConfig], None]) -> None:
        self._given = self._config = given
        self._parts = parts

    def follow(self, store: MetadataStore, paths: NamespacePaths) -> NodeFollower:
        """Take over the settings of the cluster, soon and after each change, until it is closed."""
        return ClusterSettingsStore(store, paths).follow("proxy", self.configure)

    def configure(self, settings: Mapping[str, Value]) -> None:
        """Take over the settings of the cluster; the others are as they were given.

        Raises:
            ConfigurationError: a value is wrong; nothing changes.
        """
        known = {key: value for key, value in settings.items() if key in LIVE_SETTINGS}
        config = replace(self._given, **known)  # type: ignore[arg-type]  # checked
        if config == self._config:
            return
        logger.info("settings of the cluster are in use: %s", known)
        self._config = config
        for configure in self._parts:
            configure(config)
