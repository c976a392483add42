"""Cold segments: their entries as rows of Parquet objects, and how they are read."""
