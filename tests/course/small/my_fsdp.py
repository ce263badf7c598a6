"""Write it here."""
