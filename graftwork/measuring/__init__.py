"""Measurements: speed, agreement with the target, tuning of trees and thresholds."""
