"""The recipe: learning rate, parameter groups, optimizer."""
