"""Detection of objects: the outputs of a network to boxes, scores and labels."""
