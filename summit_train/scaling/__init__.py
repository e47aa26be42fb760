"""What a step costs at scale: measured here, or worked out for a machine that is not at hand."""
