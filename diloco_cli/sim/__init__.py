"""The simulator: the protocol core on a virtual clock with simulated links."""
