"""The mark before the reference answer in GSM8K's format, in files of tasks and in responses of models that learned from them."""

MARK = "####"
"""Separates the reasoning from the reference answer."""
