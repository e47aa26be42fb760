"""What every room stands on: the world of ranks, files, errors, processes, random numbers, text."""
