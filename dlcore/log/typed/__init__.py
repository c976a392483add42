"""Logs with a schema: how it is stored, how it may change, and how rows are fitted to it."""
