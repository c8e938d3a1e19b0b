"""What a call asks for: its options, prompts and texts, when it ends, who listens."""
