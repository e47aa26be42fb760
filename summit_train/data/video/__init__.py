"""The pixels of a clip: decoding, sampling, augmentation. Only this room imports PyAV."""
