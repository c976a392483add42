"""Hands buffers to a transport so that it pauses its protocol on every supported Python."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dlcore.wire.frames import gather

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from dlcore.wire.messages import Buffer

_PAUSES = not ((3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2))
"""Whether asyncio's `writelines` pauses the protocol when its buffer is full (CVE-2024-12254)."""


def send(transport: asyncio.WriteTransport, buffers: Sequence[Buffer]) -> None:
    """Send buffers in order; if the peer does not read, the transport pauses its protocol.

    If `writelines` of this Python does not pause, the buffers are copied once more instead.
    """
    if _PAUSES:
        transport.writelines(gather(buffers) if len(buffers) > 1 else buffers)
    else:
        transport.write(b"".join(buffers))
