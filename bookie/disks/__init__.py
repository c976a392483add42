"""The bookie's files, on a real disk, and in memory with simulated faults."""
