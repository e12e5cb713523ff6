"""`nereid tune`: the best settings of a model for this machine, found on the real server under load."""
