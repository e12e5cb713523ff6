"""Several processes as one gateway: their start and end, and the state that they share."""
