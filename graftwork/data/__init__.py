"""The user's text: prompts, and documents for calibration and training."""
