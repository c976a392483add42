"""The work that a bookie does by itself: garbage, compaction, scrubbing."""
