"""Compression of entries, if it pays off, and the Arrow messages of their batches.

Compression costs time at the writer and at each reader, and saves bytes that are sent, stored and
verified three times.  Therefore an entry is stored compressed if that makes it smaller by an eighth
or more.  After an entry for which it does not, the next ones, up to 15 times its size, are not
tried.

With ``auto`` only typed logs' entries that are large enough are tried: each column has buffers of
its own, and each buffer takes some microseconds in both directions.
"""

from __future__ import annotations

import pyarrow as pa

COMPRESSED_BYTES_MIN = 32 * 1024
"""With ``auto`` smaller entries are stored without compression."""
_SAVED_SHARE = 8
_UNTRIED_FACTOR = 15
_END_BYTES = 8  # the end-of-stream marker of Arrow's IPC streaming format


class Compressor:
    """Makes the messages of consecutive entries, as `LogConfig.compression` says."""

    def __init__(self, compression: str) -> None:
        self._is_auto = compression == "auto"
        self._options: pa.ipc.IpcWriteOptions | None = None
        if compression != "none":
            codec = "lz4" if self._is_auto else compression
            # Threads would cost more than the columns of an entry.
            self._options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
        self._untried_bytes = 0

    @property
    def leaves_bytes(self) -> bool:
        """Whether entries of byte logs are stored without compression."""
        return self._options is None or self._is_auto

    def message(self, batch: pa.RecordBatch, *, typed: bool) -> tuple[pa.Buffer, bool]:
        """Return the encapsulated message of a batch, and whether its buffers are compressed."""
        if self._options is not None and (typed or not self._is_auto):
            size_bytes = batch.nbytes
            if size_bytes <= self._untried_bytes:
                self._untried_bytes -= size_bytes
            elif size_bytes >= COMPRESSED_BYTES_MIN or not self._is_auto:
                message = _compressed(batch, self._options)
                if message.size <= size_bytes - size_bytes // _SAVED_SHARE:
                    return message, True
                self._untried_bytes = _UNTRIED_FACTOR * size_bytes
        return batch.serialize(), False


def _compressed(batch: pa.RecordBatch, options: pa.ipc.IpcWriteOptions) -> pa.Buffer:
    # `RecordBatch.serialize` takes no options, but a stream does.  Its batch message is after the
    # schema's message (a prefix of 8 bytes with the length, then that many), before the end marker.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    stream = sink.getvalue()
    start = 8 + int.from_bytes(memoryview(stream)[4:8], "little")
    return stream.slice(start, stream.size - start - _END_BYTES)
