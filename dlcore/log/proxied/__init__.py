"""Extends the writer of a log for proxies: producers number records, and appends take turns."""
