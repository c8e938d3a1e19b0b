"""Drafts: who makes them, how long they get, and how they are verified."""
