"""The flight recorder: what each step of a run was trained on, and what came of it."""
