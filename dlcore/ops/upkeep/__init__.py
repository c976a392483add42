"""The upkeep of logs: merging of small extents, retention, and removal."""
