"""Tests that cannot even be read: what they run is not known."""

raise ImportError("missing")
