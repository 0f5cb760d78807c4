"""One attempt of a run after the other: processes started, watched and stopped, on one machine or in a Slurm allocation."""
