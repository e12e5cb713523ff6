"""The structure of image files, read without decoding a pixel."""
