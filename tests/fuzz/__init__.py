"""Fuzzing of the controller's sockets, of the endpoints of episodes and of what scorers answer: `make fuzz`."""
