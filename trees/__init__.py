"""Trajectory trees: a crash-safe, token-exact store in HDF5 and what is cut from it. Knows neither cells nor gyre_hpc; no torch."""
