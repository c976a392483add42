"""A server of metadata as a child process: what all kinds can do, and one for a single host.

The latter needs neither Java nor PySpark.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dlcore.base.errors import MetadataConnectionError
from dlcore.ops.sandbox.process import (
    HOST,
    ChildProcess,
    PortReservation,
    Restartable,
    Startable,
    Warden,
    python_path,
)


class MetadataProcess(Restartable, Startable):
    """One server, with its data and log under `data_dir`.

    Without `port` a free one is chosen at the first start, and kept.
    """

    def __init__(
        self, data_dir: Path | str, *, host: str, port: int | None, warden: Warden | None
    ) -> None:
        self._data_dir = Path(data_dir).absolute()
        self._host = host
        self._port = port
        self._given_warden = warden
        self._warden: Warden | None = None

    def __repr__(self) -> str:
        state = "running" if self.is_running else "stopped"
        return f"<{type(self).__name__} {self._host}:{self._port} {state}>"

    @property
    def servers(self) -> str:
        """Address for clients: ``host:port``."""
        assert self._port is not None
        return f"{self._host}:{self._port}"

    def _watching(self) -> Warden:
        """Return the warden that the child is started with."""
        if self._given_warden is not None:
            return self._given_warden
        self._warden = self._warden or Warden()
        return self._warden

    def stop(self) -> None:
        """Stop the server; do nothing if it does not run."""
        if self._child is not None:
            self._child.terminate()
            self._child = None
        if self._warden is not None:
            self._warden.close()
            self._warden = None


_START_TIMEOUT_S = 60.0
_SERVING = re.compile(r"^metadata server serving on \S+$", re.MULTILINE)


class EmbeddedMetadataServer(MetadataProcess):
    """`dlog metadata serve` on the loopback interface.

    Raises (from `start`):
        ConfigurationError: the port is in use.
        MetadataConnectionError: the server ended, or did not serve in time.
    """

    name = "the metadata server"

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
        self._child = ChildProcess(
            [sys.executable, *command],
            log_path=self._data_dir / "metadata-server.log",
            warden=self._watching(),
            environment={"PYTHONPATH": python_path()},
        )
        self._wait_for(_SERVING, timeout_s=_START_TIMEOUT_S, error=MetadataConnectionError)
