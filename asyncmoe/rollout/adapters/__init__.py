"""Environments of other packages, trained as they are."""
