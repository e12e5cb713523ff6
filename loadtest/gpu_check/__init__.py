"""The checks that need an NVIDIA GPU, in sections of one run of ten minutes."""
