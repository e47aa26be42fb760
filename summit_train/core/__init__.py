"""The foundation of every other package: the world of ranks, files, errors, processes, random numbers, text."""
