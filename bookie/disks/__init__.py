"""Files as the storage needs them, on a real disk and in memory with its faults."""
