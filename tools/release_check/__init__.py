"""Checks of a release: the same bytes from each build, its list of parts, known weaknesses."""
