"""What the blocking face offers beyond writing and reading, on a real cluster."""

from __future__ import annotations

import pyarrow as pa
import pytest

from dlcore import LogRecord, LogSettings
from dlcore.errors import ConfigurationError
from dlcore.sync import open_namespace


def test_settings_of_a_log(namespace_uri: str) -> None:
    """They are stored with it, and change under a running writer."""
    with open_namespace(namespace_uri) as namespace, open_namespace(namespace_uri) as other:
        namespace.create_log("face/settings", settings=LogSettings(entry_bytes=200))
        log = namespace.open_log("face/settings", create_if_missing=True)
        with log.open_writer() as writer:
            writer.write_batch(pa.record_batch({"txid": [1] * 4, "payload": [b"x" * 88] * 4}))
            writer.flush()
            elsewhere = other.open_log("face/settings")
            assert elsewhere.update_settings(segment_bytes_max=400).entry_bytes == 200
            while len(log.get_log_segments()) < 2:
                writer.write(LogRecord(2, b"y" * 88))
                writer.flush()
        assert log.get_settings() == LogSettings(entry_bytes=200, segment_bytes_max=400)
        with pytest.raises(ConfigurationError, match="a log has the settings entry_bytes"):
            log.update_settings(colour="red")
