"""What is merged, folded and swept: fewer operations and weights for the same values."""
