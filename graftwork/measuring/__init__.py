"""Measurements: speed, agreement with the target, and settings chosen by measuring."""
