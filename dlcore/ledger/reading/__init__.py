"""Entries from bookies: one, a range, or all that come, with a second replica when one is slow."""
