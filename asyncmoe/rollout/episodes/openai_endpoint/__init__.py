"""An endpoint for each episode with the APIs of OpenAI and Anthropic, so that an agent written for them is trained unchanged."""
