"""Document fields, such as a tracking number, extracted from recognised lines of text."""
