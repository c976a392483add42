"""The fixtures' plugins, and nothing else."""

from __future__ import annotations

pytest_plugins = [
    "tests.fixtures.surroundings",  # first: what comes after is compiled once
    "tests.fixtures.cluster",
    "tests.fixtures.java",
    "tests.fixtures.forking",  # after what sets variables
    "tests.fixtures.forked_commands",
    "tests.fixtures.lengths",
    "tests.fixtures.examples",  # after what it imports
    "tests.fixtures.zookeeper",
    "tests.fixtures.iceberg_catalogs",  # after what it imports
    "tests.fixtures.browser",
    "tests.fixtures.proxies",  # after what it imports, as spark
    "tests.fixtures.ways",  # after what it imports
    "tests.fixtures.kafka_proxies",
    "tests.fixtures.shell",
    "tests.fixtures.spark",
    "tests.fixtures.unmeasured",
    "tests.fixtures.workers",
    "tests.fixtures.metadata_backend",  # after what it imports
]
