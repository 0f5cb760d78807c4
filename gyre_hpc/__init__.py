"""gyre_hpc: online reinforcement learning for agents whose single run lasts hours, on Slurm supercomputers."""

__version__ = "0.1.0"
