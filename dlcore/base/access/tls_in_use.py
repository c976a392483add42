"""TLS of a running process: its files are read again when their content changes.

New connections use what the files hold then; open ones stay.  Files that do not fit together are
not used, for example a new certificate whose key is not written yet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from dlcore.base.access.expiry import Expiries, Expiry, dates_of
from dlcore.base.access.files_in_use import FilesInUse
from dlcore.base.clock import SystemClock, steady_s

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    import grpc

    from dlcore.base.access.tls import PemBytes, TlsFiles
    from dlcore.base.clock import Clock

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""Least time between two looks at the files."""

T = TypeVar("T")


class _Made(NamedTuple):
    by_key: dict[str, Any]
    dates: list[Expiry]


class TlsInUse:
    """The contexts and credentials for connections that are made now, of the files of a process.

    It may be used in several threads: those of gRPC ask by themselves.

    Args:
        files: the paths of the files.
        steady: tells when to look at the files again.
        clock: tells how long certificates are still valid.

    Raises:
        ConfigurationError: a file cannot be read, or they do not fit together.
    """

    def __init__(
        self,
        files: TlsFiles,
        *,
        steady: Callable[[], float] = steady_s,
        clock: Clock | None = None,
    ) -> None:
        self.files = files
        self._steady = steady
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._makers: dict[str, Callable[[PemBytes], Any]] = {}
        self._in_use = FilesInUse(files.content, self._make, what="certificates", where=files)
        self._due_s = steady() + LOOK_S
        self._expiries = Expiries()
        self._tell_expiry()
        self.client_context()
        self.on_change: Callable[[], None] = lambda: None
        """Called in any thread after other files are in use."""

    @classmethod
    def of(cls, files: TlsFiles | None) -> TlsInUse | None:
        """Return what is in use of the files; None for none.  Raises: ConfigurationError."""
        return None if files is None else cls(files)

    @property
    def expires_at_ms(self) -> int | None:
        """When the first certificate in use expires, None if this is not known."""
        with self._lock:
            return min((each.expires_ms for each in self._in_use.made.dates), default=None)

    def client_context(self) -> ssl.SSLContext:
        """Return the context for a client's new connection."""
        return self._current("client", lambda _: self.files.client_context())

    def server_context(self, *, asks_clients: bool, requires_them: bool = True) -> ssl.SSLContext:
        """Return the context for a server's new connections; see `TlsFiles.server_context`."""
        make = partial(
            self.files.server_context, asks_clients=asks_clients, requires_them=requires_them
        )
        return self._current(f"server {asks_clients} {requires_them}", lambda _: make())

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials for a new channel of gRPC; the same ones until files change."""
        import grpc

        def make(pem: PemBytes) -> grpc.ChannelCredentials:
            return grpc.ssl_channel_credentials(pem.ca, pem.key or None, pem.cert or None)

        return self._current("channel", make)

    def server_credentials(self, *, asks_clients: bool) -> grpc.ServerCredentials:
        """Return the credentials of a server of gRPC, which uses new files by itself.

        Raises: as `TlsFiles.server_context`.
        """
        import grpc

        def make(pem: PemBytes) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)

        self.server_context(asks_clients=asks_clients)
        used = first = self._current("configuration", make)

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Return what a new connection needs if it is not what the one before had."""
            nonlocal used
            found = self._current("configuration", make)
            if found is used:
                return None
            used = found
            return found

        # types-grpcio does not know that None leaves all as it is.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", changed)
        return grpc.dynamic_ssl_server_credentials(first, fetch, asks_clients)

    def look(self) -> None:
        """Look at the files, unless this was done a moment ago."""
        with self._lock:
            now_s = self._steady()
            if now_s < self._due_s:
                return
            self._due_s = now_s + LOOK_S
            if self._in_use.look():
                self.on_change()
            self._tell_expiry()

    async def watch(self) -> None:
        """Look again and again, also while no client connects, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def _current(self, key: str, make: Callable[[PemBytes], T]) -> T:
        with self._lock:
            self.look()
            made = self._in_use.made.by_key
            if key not in made:
                self._makers[key] = make
                made[key] = make(self._in_use.content)
            found: T = made[key]
            return found

    def _make(self, content: PemBytes) -> _Made:
        made = {key: make(content) for key, make in self._makers.items()}
        return _Made(made, dates_of(self.files, content))

    def _tell_expiry(self) -> None:
        for warning in self._expiries.due(self._in_use.made.dates, now_ms=self._clock.now_ms()):
            logger.warning(
                "%s; to do: replace the certificate (docs/tls.md); it is read again without a "
                "restart",
                warning,
            )
