"""Compression of entries, where it is worth it, and the Arrow messages of their batches.

What is compressed costs whoever writes and whoever reads it; what it saves is sent, stored and
verified three times.  So an entry is stored compressed if it is at least an eighth smaller then.
Where one is not, those that follow, up to 15 times its size, are not tried.

With ``auto`` the entries of typed logs are tried that are large enough for their columns to be
worth it: each has buffers of its own, and each of these takes some microseconds in both directions.
"""

from __future__ import annotations

import pyarrow as pa

COMPRESSED_BYTES_MIN = 32 * 1024
"""With ``auto`` smaller entries are stored as they are."""
_SAVED_SHARE = 8
_UNTRIED_FACTOR = 15
_END_BYTES = 8  # the end-of-stream marker of Arrow's IPC streaming format


class Compressor:
    """Makes the messages of entries that follow each other, as `LogConfig.compression` says."""

    def __init__(self, compression: str) -> None:
        self._is_auto = compression == "auto"
        self._options: pa.ipc.IpcWriteOptions | None = None
        if compression != "none":
            codec = "lz4" if self._is_auto else compression
            # Threads would cost more than the columns of an entry do.
            self._options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
        self._untried_bytes = 0

    @property
    def leaves_bytes(self) -> bool:
        """Whether entries of logs of bytes are stored as they are."""
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
    # `RecordBatch.serialize` takes no options; a stream does, and its batch message stands between
    # the schema's, which is a prefix of 8 bytes and as many as that says, and the end marker.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    stream = sink.getvalue()
    start = 8 + int.from_bytes(memoryview(stream)[4:8], "little")
    return stream.slice(start, stream.size - start - _END_BYTES)
