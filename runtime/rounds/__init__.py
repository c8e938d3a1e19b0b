"""Ways to run decode steps."""
