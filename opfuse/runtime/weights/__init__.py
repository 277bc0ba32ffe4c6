"""Casts of weights that are kept from call to call."""
