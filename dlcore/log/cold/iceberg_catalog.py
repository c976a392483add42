"""The catalog of Iceberg tables, by the library pyiceberg: which one, and where a log is in it.

It is the one that the library knows as ``dlog``: by its file ``.pyiceberg.yaml``, or by variables
of the environment as ``PYICEBERG_CATALOG__DLOG__URI``, which may have secrets.  Nothing of it is in
dlog's metadata, or in the table's.

A REST catalog that does not answer fails a call after a minute, or after `rest.client.timeout-ms`
of its properties: the library alone would wait for ever.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import ConfigurationError, ObjectStoreError
from dlcore.base.extras import missing_packages_explained
from dlcore.log.cold import stores

if TYPE_CHECKING:
    from collections.abc import Iterator

CATALOG = "dlog"
_DEFAULT_NAMESPACE = "dlog"
_opening = threading.Lock()
_open: dict[str, Any] = {}
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


def configuration(url: str) -> dict[str, Any]:
    """Return the catalog's properties: texts, and for `auth` and `ssl` properties within them.

    Raises:
        ConfigurationError: the library is not installed, no catalog is named, or the file that
            names it cannot be read.
    """
    require_library(url)
    from pyiceberg.utils.config import Config
    from strictyaml import YAMLError

    try:
        found = Config().get_catalog_config(CATALOG) or {}
    except YAMLError as error:  # whose text has lines of the file
        mark = getattr(error, "problem_mark", None)
        raise ConfigurationError(
            f"the table in {url}: the library's file .pyiceberg.yaml cannot be read"
            + ("" if mark is None else f", at line {mark.line + 1}")
        ) from None
    if not found.get("uri") and not found.get("type"):
        raise ConfigurationError(
            f"the table in {url}: there is no catalog {CATALOG} of Iceberg; set "
            "PYICEBERG_CATALOG__DLOG__URI to its address, as sqlite:////folder/catalog.db, "
            "postgresql+psycopg2://host/database or https://host, or name it in .pyiceberg.yaml"
        )
    return dict(found)


def open_catalog(url: str) -> Any:
    """Return the catalog; it is opened once.

    Raises:
        ConfigurationError: as `configuration`, or there is no such kind of catalog.
        ObjectStoreError: it does not answer.
    """
    properties = configuration(url)
    with catalog_errors("opening it for", url):
        from pyiceberg.exceptions import NotInstalledError

        try:
            return _opened(json.dumps(properties, sort_keys=True, default=str))
        except (NotInstalledError, ValueError) as error:
            # The library repeats an address, which may have a password.
            reason = str(error).replace(str(properties.get("uri") or "\0"), "its address")
            raise ConfigurationError(f"the catalog of the table in {url}: {reason}") from None


def _opened(properties: str) -> Any:
    """Return the catalog with these properties, which are JSON; one with others is closed."""
    loading = logging.getLogger("pyiceberg.io")
    if loading.level == logging.NOTSET:
        loading.setLevel(logging.WARNING)  # it tells of each look, five times
    with _opening:
        if properties not in _open:
            chosen = json.loads(properties)
            chosen.setdefault("py-io-impl", "dlcore.log.cold.iceberg_io.TierFiles")
            found = _made(chosen)
            _close()
            _open[properties] = found
        return _open[properties]


def reopen() -> None:
    """Let the next call open the catalog again.

    Only then the library makes a catalog's own tables: SQLite's file, if it was away, is empty.
    """
    with _opening:
        _close()


def _close() -> None:
    for each in _open.values():
        each.close()  # what it is still used for fails, and is done again
    _open.clear()


def _made(properties: dict[str, Any]) -> Any:
    from pyiceberg.catalog import CatalogType, infer_catalog_type, load_catalog

    if "py-catalog-impl" not in properties:
        given = properties.get("type")
        kind = CatalogType(str(given).lower()) if given else infer_catalog_type(CATALOG, properties)
        if kind is CatalogType.REST:
            from dlcore.log.cold.iceberg_private import BoundedRestCatalog

            return BoundedRestCatalog(CATALOG, **properties)
        if kind is CatalogType.SQL and str(properties.get("uri")).startswith("sqlite:///"):
            try:
                from dlcore.log.cold.sqlite_catalog import SqliteCatalog
            except ModuleNotFoundError:  # SQLAlchemy: the library says how to install it
                return load_catalog(CATALOG, **properties)
            return SqliteCatalog(CATALOG, **properties)
    return load_catalog(CATALOG, **properties)


def identifier_of(place: tuple[str, str]) -> tuple[str, ...]:
    """Return a table's name for the library, of its namespace, whose parts dots join, and name."""
    namespace, name = place
    return (*namespace.split("."), name)


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

    with catalog_errors("reading the table", url), suppress(NoSuchTableError, NoSuchNamespaceError):
        return catalog.load_table(identifier_of(place))
    return None


def namespace_of(url: str) -> str:
    """Return the catalog's namespace of new tables."""
    return str(configuration(url).get("namespace", _DEFAULT_NAMESPACE))


@contextmanager
def catalog_errors(what: str, url: str) -> Iterator[None]:
    """Raise errors of the library as `ObjectStoreError`; the next call opens the catalog again."""
    from pyiceberg import exceptions

    kinds = [each for each in vars(exceptions).values() if isinstance(each, type)]
    kinds += [ValueError, RuntimeError, *_of_databases()]
    what = f"catalog {CATALOG}: {what}"
    try:
        with stores.store_errors(
            what, url, *(each for each in kinds if issubclass(each, Exception))
        ):
            yield
    except ObjectStoreError:
        reopen()
        raise


def _of_databases() -> list[type[Exception]]:
    try:
        from sqlalchemy.exc import SQLAlchemyError
    except ModuleNotFoundError:
        return []
    return [SQLAlchemyError]
