"""The GPUs of this machine: what is there, what the packages support, and what a server uses."""
