"""Arrow Flight as a proxy speaks it: requests of clients, which are checked, and answers."""
