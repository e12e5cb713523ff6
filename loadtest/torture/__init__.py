"""Valid and invalid requests, changes and faults on a real server, and one verdict on what they leave."""
