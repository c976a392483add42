"""The log layer: one unbounded stream of records made of segments."""
