"""`asyncmoe plan`: estimate memory, traffic and placement of a run from its configuration alone."""
