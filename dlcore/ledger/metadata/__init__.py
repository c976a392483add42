"""What the metadata store knows of ledgers and bookies, and how quorums are counted."""
