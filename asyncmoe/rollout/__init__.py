"""The controller and its rollout workers: engines, episodes, scoring, and the weight versions the engines serve."""
