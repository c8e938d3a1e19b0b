"""How functions run: the reference interpreter, what executables offer, when values die."""
