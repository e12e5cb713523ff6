"""Numbers of instances that follow the load, for models whose config has bounds."""
