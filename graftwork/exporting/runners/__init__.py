"""What plan folders are run with; copied into them."""
