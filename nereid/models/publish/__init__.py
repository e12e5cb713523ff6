"""Changes of what a server serves: add, publish, roll back, retire."""
