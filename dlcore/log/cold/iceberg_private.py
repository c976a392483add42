"""All that dlog uses of the library pyiceberg beside its public names, in one place.

Another version of the library may have none of it: tests show that `VERSIONS` have it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog.rest import RestCatalog

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection

    from requests import Session

VERSIONS = "0.12"
"""The beginnings of the versions that have all of it; pyproject.toml allows no others."""
TIMEOUT = "rest.client.timeout-ms"
_TIMEOUT_MS = 60_000


class BoundedRestCatalog(RestCatalog):
    """Fails a call whose connection, or each next part of its answer, takes too long.

    The library's own waits for answers for ever, and has no property for it.
    """

    def _create_session(self) -> Session:
        session = super()._create_session()
        bounded = partial(session.request, timeout=_timeout_s(self.properties.get(TIMEOUT)))
        session.request = bounded  # type: ignore[method-assign]
        return session


def read_only(snapshot: Any, manifests: Collection[str]) -> None:
    """Let a snapshot that is being made read only these manifests, by their URLs, to remove files.

    By partitions, which there are none of, the library would read every manifest, twice.
    """
    assert hasattr(snapshot, "_build_manifest_evaluator"), "another version of pyiceberg"
    snapshot._build_manifest_evaluator = lambda _: lambda each: each.manifest_path in manifests


def _timeout_s(given: str | None) -> float:
    if given is None:
        return _TIMEOUT_MS / 1000
    if not given.isascii() or not given.isdigit() or int(given) == 0:
        raise ConfigurationError(
            f"the property {TIMEOUT} of the catalog is {given!r}, expected milliseconds, 1 or more"
        )
    return int(given) / 1000
