"""How the network in the model repository was made."""
