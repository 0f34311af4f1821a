"""Episodes: environments, tools and agents, and the trajectories they produce."""
