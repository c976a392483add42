"""The dlog command."""
