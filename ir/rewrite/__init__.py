"""Edits of functions: patterns and rules, expansion, pieces, and cleaning up."""
