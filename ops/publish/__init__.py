"""What changes the set of models that are served: add, publish, roll back, retire, and list the versions."""
