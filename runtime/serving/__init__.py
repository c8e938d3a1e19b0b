"""Continuous batching: requests come and go while others are decoded (`engine`)."""
