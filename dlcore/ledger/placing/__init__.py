"""The choice of the bookies for a ledger, and the bookies that are not chosen for a while."""
