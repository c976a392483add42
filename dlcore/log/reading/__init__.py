"""Reads records from entries: snapshots of a log, reads of a part of it, following its tail."""
