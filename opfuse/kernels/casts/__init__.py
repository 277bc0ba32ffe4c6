"""The casts and their inverse as the library calls them."""
