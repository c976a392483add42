"""The background work of a bookie: garbage collection, compaction, scrubbing."""
