"""The metadata server of one host as a child process: it needs neither Java nor PySpark."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from dlcore.base.errors import MetadataConnectionError
from dlcore.ops.sandbox.metadata_process import MetadataProcess
from dlcore.ops.sandbox.process import (
    HOST,
    ChildProcess,
    PortReservation,
    Warden,
    python_path,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path

_START_TIMEOUT_S = 60.0
_SERVING = re.compile(r"^metadata server serving on \S+$", re.MULTILINE)


class EmbeddedMetadataServer(MetadataProcess):
    """`dlog metadata serve` on the loopback interface.

    Raises (from `start`):
        ConfigurationError: the port is in use.
        MetadataConnectionError: the server ended, or did not serve in time.
    """

    title = "the metadata server"

    def __init__(
        self, data_dir: Path | str, *, port: int | None = None, warden: Warden | None = None
    ) -> None:
        super().__init__(data_dir, host=HOST, port=port, warden=warden)

    def _start(self) -> None:
        self._data_dir.mkdir(parents=True, exist_ok=True)
        reservation = PortReservation(self._port or 0)
        try:
            self._port = reservation.port
            self._start_and_wait()
        finally:
            reservation.release()

    def _start_and_wait(self) -> None:
        command = ["-m", "dlcore.ops.cli", "metadata", "serve", "--host", HOST]
        command += ["--port", str(self._port), "--data-dir", str(self._data_dir)]
        child = self._child = ChildProcess(
            [sys.executable, *command],
            log_path=self._data_dir / "metadata-server.log",
            warden=self._watching(),
            environment={"PYTHONPATH": python_path()},
        )
        has_settled = wait_until(
            lambda: not child.is_running or _SERVING.search(child.output()) is not None,
            timeout_s=_START_TIMEOUT_S,
            child=child,
        )
        if not has_settled or not child.is_running:
            problem = "ended" if has_settled else f"does not serve after {_START_TIMEOUT_S:g} s"
            raise MetadataConnectionError(f"the metadata server {problem}: {child.describe_end()}")
