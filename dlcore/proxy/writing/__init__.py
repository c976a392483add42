"""The write path of a proxy: the logs that it owns, and the streams that write to them."""
