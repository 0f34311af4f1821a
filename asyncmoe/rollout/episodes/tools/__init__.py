"""Tools that a model may call while it responds: a calculator, a sandboxed Python, a user's own functions."""
