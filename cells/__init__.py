"""Elastic scheduling of cells: bursts, waterlevel, roles, communicators and claims. Knows neither trees nor gyre_hpc; no torch."""
