"""Commands of `gyre` that are families of their own, and what all commands share; `gyre_hpc.cli` puts them together."""
