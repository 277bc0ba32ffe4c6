"""The normalisations as the library calls them."""
