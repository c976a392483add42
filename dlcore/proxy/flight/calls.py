"""Messages written to a gRPC call that may end at any moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from typing import TypeAlias

    Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def send(context: Context, message: Any) -> None:
    """Write a message; to a call that has ended it is a cancellation."""
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        # The call ended a moment ago, and the news of it is on its way.
        raise asyncio.CancelledError from error
