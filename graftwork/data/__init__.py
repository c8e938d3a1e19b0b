"""The user's text: prompts, and documents to calibrate and train on."""
