"""Builds a rank's micro-batches from a leased batch."""
