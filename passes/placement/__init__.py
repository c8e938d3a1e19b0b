"""Which process holds what: programs that several processes run together."""
