"""One bookie's entries: `writes`, `reads`, and the objects that these share."""
