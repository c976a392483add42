"""The choice of the bookies that a ledger is written to, and of those left out for a while."""
