"""CPU time of a sample on a model so small that fixed costs rule: `asyncmoe bench peers`."""
