"""An OpenAI-compatible endpoint for each episode, so that an agent written for that API is trained unchanged."""
