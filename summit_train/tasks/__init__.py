"""What a network learns to do: what of it is of one task alone. Rooms import it in functions, where they need it."""
