"""The MPI step: rank 0, which carries out what the policy decides, and the ranks of cells, which train and serve."""
