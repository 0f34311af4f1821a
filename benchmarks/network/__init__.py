"""Weights over a real TCP network of one machine: its hosts are namespaces, its links have a set rate."""
