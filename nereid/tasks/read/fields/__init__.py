"""Fields of a document, such as a tracking number, out of the lines of text that were read from it."""
