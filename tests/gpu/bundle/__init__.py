"""One folder that proves on a GPU machine without a network what no other machine can; see README.md beside this."""
