"""Result types of calls, from the types of their arguments."""
