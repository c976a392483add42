"""The writer of a ledger: sends entries, changes ensembles, tells bookies the LAC."""
