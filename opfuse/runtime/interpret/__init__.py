"""Runs a segment op by op, and defines what every other way of running it must compute."""
