"""Trajectory trees for other programs (`gyre trees export`): one module a format."""
