"""Large-scale training of video networks: one spec, any number of GPUs."""

__version__ = "0.3.0"
