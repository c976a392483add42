"""`make trace`: the modules that a record passes, and what the classes of the product have."""
