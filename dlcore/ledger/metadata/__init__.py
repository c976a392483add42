"""Metadata of ledgers and bookies, and how quorums are counted."""
