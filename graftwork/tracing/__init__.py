"""Models as programs, before a recipe changes them."""
