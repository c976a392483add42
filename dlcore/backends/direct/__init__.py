"""Logs over a metadata store and bookies."""
