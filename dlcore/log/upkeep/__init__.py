"""Upkeep of old logs: small extents are merged, and what nobody needs goes."""
