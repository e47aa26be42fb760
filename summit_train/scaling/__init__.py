"""What a step costs at scale, worked out for a machine that is not here."""
