"""The controller process: engines, episodes, scoring, and the weight versions the engines serve."""
