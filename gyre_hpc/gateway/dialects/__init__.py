"""What harnesses speak: request bodies in, one canonical conversation; events out. Pure."""
