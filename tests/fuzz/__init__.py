"""Fuzzing of the controller's sockets, and of the endpoints of episodes: `make fuzz`."""
