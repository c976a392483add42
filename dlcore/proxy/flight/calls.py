"""What both ends of a gRPC call need: it may end at any moment, and be silent for long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from typing import TypeAlias

    Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


_SILENCE_MS = 20_000
KEEPALIVE_OPTIONS = [
    ("grpc.keepalive_time_ms", _SILENCE_MS),
    ("grpc.keepalive_timeout_ms", _SILENCE_MS),
    ("grpc.http2.ping_timeout_ms", _SILENCE_MS),
    ("grpc.http2.max_pings_without_data", 0),
]
"""Of either end: whether the other is still there is asked when it is silent for so long."""


def principal_of(context: Context) -> str | None:
    """Return the common name in the certificate of a call's client, if he has one."""
    for name in context.auth_context().get("x509_common_name", ()):
        return name.decode("utf-8", "replace")
    return None


async def send(context: Context, message: Any) -> None:
    """Write a message; to a call that has ended it is a cancellation."""
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        # The call ended a moment ago, and the news of it is on its way.
        raise asyncio.CancelledError from error
