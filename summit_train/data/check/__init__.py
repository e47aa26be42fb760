"""What the files of a data set really hold."""
