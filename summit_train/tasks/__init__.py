"""Code that only one task needs. Other modules import it inside the functions that use it."""
