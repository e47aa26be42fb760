"""What a step costs at scale, worked out for a machine that is not here; the published numbers to compare with."""
