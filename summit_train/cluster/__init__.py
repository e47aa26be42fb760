"""What the machine around the run says of itself."""
