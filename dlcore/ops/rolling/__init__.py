"""The restart of a cluster, one process after the other."""
