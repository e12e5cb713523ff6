"""Commands about the drift of models."""
