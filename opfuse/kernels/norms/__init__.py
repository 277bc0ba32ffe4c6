"""The launches of normalisations."""
