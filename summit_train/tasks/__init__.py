"""What a network learns to do: a folder for each task, and the table of them."""

import summit_train.spec  # noqa: F401  (the keys of tasks are part of a spec's, whichever is imported first)
