"""The tasks that a gateway offers: their models, endpoints and answers."""
