"""Execution: the reference interpreter, the protocol of executables, analyses."""
