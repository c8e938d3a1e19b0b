"""Drafters, and the policies of what they draft."""
