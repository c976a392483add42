"""Closes a ledger whose writer is gone: fence, find the last entry, close."""
