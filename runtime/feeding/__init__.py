"""Feeding functions: token lists in, outputs out, in memory that outlives a step."""
