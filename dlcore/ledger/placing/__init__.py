"""Which bookies a ledger is written to, and which are left out for a while."""
