"""Random faults at seeded moments in whole runs: `make test-chaos`. See `__main__`."""
