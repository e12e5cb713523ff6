"""The tasks of networks that can be added: how their files are read, and which models serve them."""
