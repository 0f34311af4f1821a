"""Measurements that can be repeated on any machine."""
