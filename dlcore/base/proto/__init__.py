"""Wire and metadata messages; generated, never edited."""
