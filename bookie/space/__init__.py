"""The rules for writes to a disk that is nearly full."""
