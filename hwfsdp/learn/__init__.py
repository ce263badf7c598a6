"""The classroom: exercises cut out of this package, and what grades them."""
