"""Tools that generate code of the project."""
