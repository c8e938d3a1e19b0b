"""Tracing of models, and the cache of optimized programs."""
