"""Where tasks come from: generated chores, or a folder in Harbor format."""
