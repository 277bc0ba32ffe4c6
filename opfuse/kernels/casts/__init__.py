"""The launches of casts and of their inverse."""
