"""One module for each command: `add_arguments(parser)`, and `run(args)`, which returns the `Result` to print."""
