"""Calls of a pipeline: its plans by key, its segments interpreted, recorded and repeated."""
