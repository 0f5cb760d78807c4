"""A small coding agent of our own, as a program that knows nothing of the system but HTTP."""
