"""What keeps an old log small: small extents are merged, and what nobody needs goes."""
