"""The accuracy of a network: views to scores to top-1, on any number of ranks; fusion of scores."""
