"""Saved programs, and where results may be written."""
