"""Packages that only a part of dlog needs, and the extras that install them.

A plain installation reads and writes logs over proxies.  `pip install 'distributed-dlog[…]'` adds
the rest: `cluster` for logs over ZooKeeper and bookies, and for running bookies, `cli` for the
`dlog` command, `iceberg` for workers that keep Iceberg tables of logs, `kafka` for Kafka's protocol
at a proxy, `metrics` for a client's metrics, `spark` for the Spark data source, `table` for workers
that keep Delta tables of logs, and `tier` for logs with cold segments in an object store.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

EXTRA_OF = {
    "aiohttp": "cli",
    "click": "cli",
    "crc32c": "cluster",
    "cryptography": "cluster",
    "deltalake": "table",
    "joserfc": "cluster",
    "kazoo": "cluster",
    "duckdb": "sql",
    "kio": "kafka",
    "obstore": "tier",
    "pandas": "spark",
    "prometheus_client": "metrics",
    "pyiceberg": "iceberg",
    "pyspark": "spark",
    "rich": "cli",
}
"""The extra of each package."""


@contextmanager
def missing_packages_explained() -> Iterator[None]:
    """Name the extra in the error of an import that fails for want of a package.

    Raises:
        ModuleNotFoundError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        raise ModuleNotFoundError(
            f"{package} is not installed, and this part of dlog needs it: "
            f"pip install 'distributed-dlog[{EXTRA_OF[package]}]'",
            name=error.name,
        ) from error
