"""Logs with a schema: what is stored of it, how it may change, and how rows come to fit it."""
