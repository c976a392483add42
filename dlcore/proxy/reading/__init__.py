"""The read path of a proxy: logs followed once for all their readers, and ranges of logs."""
