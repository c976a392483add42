"""The dates at which certificates expire, with a warning from 14 days before, once a day."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.access.tls import PemBytes, TlsFiles

_DAY_MS = 24 * 3600 * 1000
WARNED_BEFORE_MS = 14 * _DAY_MS


@dataclass(frozen=True, slots=True)
class Expiry:
    """The time from which a file of certificates is of no more use."""

    path: str
    expires_ms: int
    """In epoch milliseconds."""


class Expiries:
    """Decides which warnings to write."""

    def __init__(self) -> None:
        self._warned_ms: dict[Expiry, int] = {}

    def due(self, found: Sequence[Expiry], *, now_ms: int) -> list[str]:
        """Return the warnings to write now; those of files that were replaced are forgotten."""
        self._warned_ms = {each: ms for each, ms in self._warned_ms.items() if each in found}
        warnings = []
        for each in found:
            warned_ms = self._warned_ms.get(each)
            is_near = each.expires_ms - now_ms <= WARNED_BEFORE_MS
            if is_near and (warned_ms is None or now_ms - warned_ms >= _DAY_MS):
                self._warned_ms[each] = now_ms
                warnings.append(_warning_of(each, now_ms))
        return warnings


def dates_of(files: TlsFiles, content: PemBytes) -> list[Expiry]:
    """Return when the own certificate expires, and when the last of the authorities does.

    Without the package `cryptography`, which servers have, nothing is known.

    Raises:
        ConfigurationError: the content is no certificate.
    """
    try:
        from cryptography import x509  # a process without TLS does not need it
    except ModuleNotFoundError:
        return []

    found = []
    # A chain is valid until its first certificate expires; one valid authority is enough.
    for path, pem, which in ((files.cert, content.cert, min), (files.ca, content.ca, max)):
        if path:
            try:
                each = [one.not_valid_after_utc for one in x509.load_pem_x509_certificates(pem)]
            except ValueError as error:
                raise ConfigurationError(f"TLS file {path!r}: expected PEM: {error}") from error
            found.append(Expiry(path, int(which(each).timestamp() * 1000)))
    return found


def time_of(epoch_ms: int) -> str:
    """Return a time as text, in UTC."""
    return f"{datetime.fromtimestamp(epoch_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _warning_of(expiry: Expiry, now_ms: int) -> str:
    left_ms = expiry.expires_ms - now_ms
    when = f"expires in {left_ms // _DAY_MS} days" if left_ms > 0 else "has expired"
    return (
        f"the certificate in {expiry.path} {when}, at {time_of(expiry.expires_ms)}: put a new one "
        "there, it is read without a restart"
    )
