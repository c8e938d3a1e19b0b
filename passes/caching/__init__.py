"""States that live across steps: the KV cache."""
