"""How the values of a weight of few bits are chosen: a file a method. See `base`."""
