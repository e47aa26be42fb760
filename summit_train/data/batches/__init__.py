"""Which clips a rank trains on, in which order, and the processes that read them."""
