"""From entries back to records: snapshots of a log, reading a part of it, following its tail."""
