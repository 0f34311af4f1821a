"""`asyncmoe plan`: estimates memory, traffic and placement of a run from its configuration alone."""
