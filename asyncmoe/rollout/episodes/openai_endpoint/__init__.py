"""An endpoint with the APIs of OpenAI and Anthropic for each episode, so that agents written for them can be trained unchanged."""
