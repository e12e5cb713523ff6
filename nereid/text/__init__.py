"""Reading of text: boxes, rectified crops, characters, and the fields of a document."""
