"""The small policy of the quickstart, by a fixed recipe; an ordinary model directory to everybody else."""
