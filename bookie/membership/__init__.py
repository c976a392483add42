"""A bookie in its cluster: its identity, registration, the ids it takes, copies for repair."""
