"""A gRPC server that does as little as one can: echoes, after an fdatasync if asked.

Latencies are measured beside it.  `python -m benchmarks.bare_server FOLDER` prints its port and
serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import grpc

ECHO = "/bare.Bare/Echo"
WRITE = "/bare.Bare/Write"


class BareService(grpc.GenericRpcHandler):
    """Two unary methods on raw bytes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def service(
        self, call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return the handler of a method, or None if there is no such method."""
        methods = {ECHO: self._echo, WRITE: self._write}
        method = methods.get(call_details.method)
        return None if method is None else grpc.unary_unary_rpc_method_handler(method)

    async def _echo(self, request: bytes, _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return request

    async def _write(self, request: bytes, _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        os.write(self._descriptor, request)
        os.fdatasync(self._descriptor)
        return b""


async def serve(folder: Path) -> None:
    """Serve on a free port until standard input ends."""
    descriptor = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((BareService(descriptor),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(grace=0)
    os.close(descriptor)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
