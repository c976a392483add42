"""A copy of a namespace's metadata in a file, and back."""
