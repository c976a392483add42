"""The ledger layer: one replicated, fenced, append-only sequence of entries."""
