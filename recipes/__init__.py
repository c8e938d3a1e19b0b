"""The recipe files, as package data (`graftwork.recipes` is the function that lists them)."""
