"""Clients of pyarrow that put batches: one in this process, or some in a process of their own.

``python -m benchmarks.put_clients LOCATION LOG CLIENTS SECONDS`` prints ``ready`` once all its
streams are open, waits for a line, and prints how many records were acknowledged: 1 KB each, one at
a time on each stream.  Where one process had all of them they would wait for its interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

RECORD_BYTES = 1024
_PROCESSES_MAX = 4


class Put:
    """One stream to a log, which is written by batches and acknowledged in records."""

    def __init__(
        self,
        location: str,
        log: str,
        schema: pa.Schema,
        *,
        forward: bool = False,
        producer: str | None = None,
    ) -> None:
        self._client = fl.connect(location)
        descriptor = fl.FlightDescriptor.for_path(log)
        if producer is not None:
            command = json.dumps({"log": log, "producer": producer}).encode()
            descriptor = fl.FlightDescriptor.for_command(command)
        headers = [(b"dlog-forward", b"true")] if forward else []
        options = fl.FlightCallOptions(headers=headers)
        self._writer, self._answers = self._client.do_put(descriptor, schema, options)
        self.sent = self.acked = 0
        self.acked_at: list[float] = []
        self.moved_to: str | None = None
        assert "ready" in self._reply()

    def _reply(self) -> dict[str, Any]:
        """Wait for the next answer."""
        answer = self._answers.read()
        if answer is None:
            self._writer.close()  # raises why
            raise AssertionError("the stream ended without an error")
        reply: dict[str, Any] = json.loads(answer.to_pybytes())
        if "acked" in reply:
            self.acked = reply["acked"]
            self.acked_at.append(time.perf_counter())
        elif "draining" in reply:
            self.moved_to = reply["draining"]["location"] or ""
        return reply

    def write(self, batch: pa.RecordBatch, *, in_flight_max: int) -> None:
        """Send a batch; wait until only so many records are on their way, or the log moves."""
        self._writer.write_batch(batch)
        self.sent += batch.num_rows
        while self.sent - self.acked > in_flight_max and self.moved_to is None:
            self._reply()

    def flush(self) -> None:
        """Wait until all is durable."""
        while self.acked < self.sent:
            self._reply()

    def close(self) -> None:
        """End the stream when all is durable."""
        self.flush()
        self.leave()

    def leave(self) -> None:
        """End the stream without looking back."""
        self._writer.done_writing()
        self._writer.close()
        self._client.close()


def one_record() -> pa.RecordBatch:
    """Return a batch of 1 KB."""
    return pa.record_batch({"value": pa.array([os.urandom(RECORD_BYTES)], pa.binary())})


def small_put_rate(location: str, log: str, *, clients: int, seconds: float) -> float:
    """Return how many records a second clients get acknowledged that each wait for theirs."""
    count = min(clients, _PROCESSES_MAX)
    with ExitStack() as steps:
        processes = [
            steps.enter_context(_process(location, log, clients // count, seconds))
            for _ in range(count)
        ]
        assert [_line_of(process) for process in processes] == ["ready"] * count
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("begin\n")
            process.stdin.flush()
        return sum(int(_line_of(process)) for process in processes) / seconds


def _process(location: str, log: str, clients: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.put_clients"]
    return subprocess.Popen(
        [*command, location, log, str(clients), str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _put(location: str, log: str, clients: int, seconds: float) -> None:
    batch = one_record()
    puts = [Put(location, log, batch.schema) for _ in range(clients)]
    print("ready", flush=True)
    sys.stdin.readline()
    until = time.perf_counter() + seconds

    def write(put: Put) -> None:
        while time.perf_counter() < until:
            put.write(batch, in_flight_max=0)

    threads = [threading.Thread(target=write, args=(put,)) for put in puts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(put.acked for put in puts), flush=True)
    for put in puts:
        put.close()


if __name__ == "__main__":
    _put(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
