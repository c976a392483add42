"""The fixtures' plugins, and nothing else."""

from __future__ import annotations

pytest_plugins = [
    "tests.fixtures.cluster",
    "tests.fixtures.spark",
    "tests.fixtures.zookeeper",
]
