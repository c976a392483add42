"""The read path of a proxy: one follower of a log for all its readers, and ranges of logs."""
