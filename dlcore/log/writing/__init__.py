"""The one writer of a log: its lock, its segments, and the records it is given."""
