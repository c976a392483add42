"""The write path: the logs that a proxy owns, and the streams that write to them."""
