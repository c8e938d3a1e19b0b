"""Which weights get how many bits, and how."""
