"""One bookie's entries: what it takes (`writes`), what it answers (`reads`), and how it is kept."""
