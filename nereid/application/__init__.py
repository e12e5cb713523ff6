"""The programs of the product, composed of the rooms below; commands and other programs start them."""
