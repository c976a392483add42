"""The rules by which a disk that is nearly full is written to."""
