"""The writer of a log: its lock, its segments, and the records that it accepts."""
