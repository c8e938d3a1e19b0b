"""What runs passes: their declarations, their order, and the checks after each."""
