"""Tools that check a user's own reversible blocks."""
