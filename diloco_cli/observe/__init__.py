"""What a run shows and writes about itself: JSON lines, trackers, the live screen."""
