"""What a run did and does, from its files alone."""
