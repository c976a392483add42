"""The socket of one client: sends to it, and reads of it or leaves its bytes to TCP."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from dlcore.base.access.tls import name_in_certificate
from dlcore.wire.frames import send

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from dlcore.wire.messages import Buffer

UNSENT_BYTES_HIGH = 64 * 1024
"""With so many bytes that the client has not received, no more answers are made."""
_UNSENT_BYTES_LOW = 16 * 1024


class ClientSocket:
    """The transport of a connection; before it is there and after its loss, calls do nothing."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        """None before the connection is made, and once it is lost."""
        self.peer: object = None
        """The common name of the client's certificate, else its address; for logs."""

    def connect(self, transport: asyncio.BaseTransport) -> Mapping[str, object] | None:
        """Begin; return the client's certificate, None without one."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=UNSENT_BYTES_HIGH, low=_UNSENT_BYTES_LOW)
        certificate: Mapping[str, object] | None = transport.get_extra_info("peercert")
        self.peer = name_in_certificate(certificate) or transport.get_extra_info("peername")
        return certificate

    @property
    def is_open(self) -> bool:
        """Whether the client can be sent something."""
        return self.transport is not None and not self.transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were sent, and that the network has not taken."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send buffers, one after the other."""
        if self.transport is not None and not self.transport.is_closing():
            send(self.transport, buffers)

    def end_sending(self) -> None:
        """Tell the client that nothing more comes."""
        if self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()

    def set_reading(self, *, is_reading: bool) -> None:
        """Read what the client sends, or leave it to TCP, which stops the client."""
        if self.transport is None:
            return
        if is_reading:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def close(self) -> None:
        """End when all answers were sent."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """End at once."""
        if self.transport is not None:
            self.transport.abort()
