"""Rules that score the rows of a cache: a file a rule. See `base`."""
