"""Traced to canonical: groups of ATen calls become the graftwork ops that they spell out."""
