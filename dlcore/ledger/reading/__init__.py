"""Reads of entries from bookies: one, a range, or new ones; a second replica if one is slow."""
