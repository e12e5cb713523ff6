"""Checked values from `config.pbtxt` and server flags; nothing here imports Triton."""
