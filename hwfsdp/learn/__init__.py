"""The classroom: stations, electives, homework and lab, and what grades them."""
