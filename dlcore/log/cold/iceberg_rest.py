"""A REST catalog of Iceberg whose calls end: the library's own waits for answers for ever."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pyiceberg.catalog.rest import RestCatalog

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from requests import Session

TIMEOUT = "rest.client.timeout-ms"
_TIMEOUT_MS = 60_000


class BoundedRestCatalog(RestCatalog):
    """Fails a call whose connection, or each next part of its answer, takes too long."""

    def _create_session(self) -> Session:
        session = super()._create_session()
        bounded = partial(session.request, timeout=_timeout_s(self.properties.get(TIMEOUT)))
        session.request = bounded  # type: ignore[method-assign]
        return session


def _timeout_s(given: str | None) -> float:
    if given is None:
        return _TIMEOUT_MS / 1000
    if not given.isascii() or not given.isdigit() or int(given) == 0:
        raise ConfigurationError(
            f"the property {TIMEOUT} of the catalog is {given!r}, expected milliseconds, 1 or more"
        )
    return int(given) / 1000
