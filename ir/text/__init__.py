"""The text form of programs: printing, and reading it back."""
