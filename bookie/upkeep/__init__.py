"""What a bookie does by itself: garbage, compaction, scrubbing."""
