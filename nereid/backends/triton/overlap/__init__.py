"""Batches of a model on a GPU that overlap: one is decoded while the network computes the one before."""
