"""Rules that give caches budgets of their own: a file a rule. See `base`."""
