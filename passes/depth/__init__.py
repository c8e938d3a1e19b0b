"""Which layers run: skipped ones, a step in segments, exits."""
