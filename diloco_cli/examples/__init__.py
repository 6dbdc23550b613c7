"""Small complete examples that recipes point at."""
