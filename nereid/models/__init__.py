"""How a repository changes: publishing, rollouts and routes."""
