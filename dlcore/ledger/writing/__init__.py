"""The one writer of a ledger: entries to their write sets, ensembles changed, the LAC told."""
