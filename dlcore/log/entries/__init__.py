"""What one entry of a log holds: a header and an Arrow record batch."""
