"""Changes to what a server serves: add, publish, roll back, retire."""
