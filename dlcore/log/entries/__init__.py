"""The body of a log's entries: a header and an Arrow record batch."""
