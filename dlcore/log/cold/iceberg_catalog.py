"""The catalog of Iceberg tables, by the library pyiceberg: which one, and where a log is in it.

It is the one that the library knows as ``dlog``: by its file ``.pyiceberg.yaml``, or by variables
of the environment as ``PYICEBERG_CATALOG__DLOG__URI``, which may have secrets.  Nothing of it is in
dlog's metadata, or in the table's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import ConfigurationError, ObjectStoreError
from dlcore.base.extras import missing_packages_explained

if TYPE_CHECKING:
    from collections.abc import Iterator

CATALOG = "dlog"
_REASON_MAX = 300
_DEFAULT_NAMESPACE = "dlog"
_opening = threading.Lock()
_open: dict[tuple[tuple[str, str], ...], Any] = {}
"""The catalog that is open, by its properties: at most one."""


def require_library(url: str) -> None:
    """Require that the library is installed.

    Raises:
        ConfigurationError: it is not.
    """
    try:
        with missing_packages_explained():
            import pyiceberg.utils.config  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"the table in {url}: {error}") from error


def configuration(url: str) -> dict[str, str]:
    """Return the catalog's properties.

    Raises:
        ConfigurationError: the library is not installed, or no catalog is named.
    """
    require_library(url)
    from pyiceberg.utils.config import Config

    found = Config().get_catalog_config(CATALOG) or {}
    if not found.get("uri") and not found.get("type"):
        raise ConfigurationError(
            f"the table in {url}: there is no catalog {CATALOG} of Iceberg; set "
            "PYICEBERG_CATALOG__DLOG__URI to its address, as sqlite:////folder/catalog.db, "
            "postgresql+psycopg2://host/database or https://host, or name it in .pyiceberg.yaml"
        )
    return {name: str(value) for name, value in found.items()}


def open_catalog(url: str) -> Any:
    """Return the catalog; it is opened once.

    Raises:
        ConfigurationError: as `configuration`, or there is no such kind of catalog.
        ObjectStoreError: it does not answer.
    """
    properties = configuration(url)
    with told("opening the catalog of", url):
        from pyiceberg.exceptions import NotInstalledError

        try:
            return _opened(tuple(sorted(properties.items())))
        except (NotInstalledError, ValueError) as error:
            # The library repeats an address, which may have a password.
            reason = str(error).replace(properties.get("uri") or "\0", "its address")
            raise ConfigurationError(f"the catalog of the table in {url}: {reason}") from None


def _opened(properties: tuple[tuple[str, str], ...]) -> Any:
    """Return the catalog with these properties; one with others is closed."""
    from pyiceberg.catalog import load_catalog

    loading = logging.getLogger("pyiceberg.io")
    if loading.level == logging.NOTSET:
        loading.setLevel(logging.WARNING)  # it tells of each look, five times
    with _opening:
        if properties not in _open:
            chosen = dict(properties)
            chosen.setdefault("py-io-impl", "dlcore.log.cold.iceberg_io.TierFiles")
            found = load_catalog(CATALOG, **chosen)
            for other in _open.values():
                other.close()  # what it is still used for fails, and is done again
            _open.clear()
            _open[properties] = found
        return _open[properties]


async def load_table(url: str, place: tuple[str, str]) -> Any:
    """Return the table of a folder, by its namespace and name; None if there is none.

    Raises:
        ConfigurationError: as `open_catalog`.
        ObjectStoreError: it cannot be read now.
    """
    return await asyncio.to_thread(_loaded, url, place)


def _loaded(url: str, place: tuple[str, str]) -> Any:
    catalog = open_catalog(url)
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    with told("reading the table", url), suppress(NoSuchTableError, NoSuchNamespaceError):
        return catalog.load_table(place)
    return None


def namespace_of(url: str) -> str:
    """Return the catalog's namespace of new tables."""
    return configuration(url).get("namespace", _DEFAULT_NAMESPACE)


@contextmanager
def told(what: str, url: str) -> Iterator[None]:
    """Raise what the library raises as `ObjectStoreError`."""
    from obstore.exceptions import BaseError
    from pyiceberg import exceptions

    kinds = [each for each in vars(exceptions).values() if isinstance(each, type)]
    kinds += [BaseError, OSError, ValueError, RuntimeError, *_of_databases()]
    try:
        yield
    except tuple(each for each in kinds if issubclass(each, Exception)) as error:
        reason = " ".join(str(error).split())[:_REASON_MAX]
        raise ObjectStoreError(f"{what} {url}: {type(error).__name__}: {reason}") from error


def _of_databases() -> list[type[Exception]]:
    try:
        from sqlalchemy.exc import SQLAlchemyError
    except ModuleNotFoundError:
        return []
    return [SQLAlchemyError]
