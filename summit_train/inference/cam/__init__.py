"""Class activation maps: where a trained network looks."""
