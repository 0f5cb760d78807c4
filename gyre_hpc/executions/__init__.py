"""Executions on a node: a box with a program in it, its budgets, and the score of the workspace that it leaves."""
