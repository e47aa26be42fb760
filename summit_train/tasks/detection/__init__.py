"""The boxes of the objects in each frame: from the list and the network to measures, a report and a stream."""
