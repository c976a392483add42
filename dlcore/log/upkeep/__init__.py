"""Upkeep of old logs: merges small extents, and removes data that is no longer needed."""
