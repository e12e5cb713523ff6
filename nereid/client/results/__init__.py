"""Results of the tasks: what a client reads from the outputs of a model."""
