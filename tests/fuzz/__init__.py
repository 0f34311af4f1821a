"""Fuzzing of every socket and HTTP endpoint of ours: `make fuzz`."""
