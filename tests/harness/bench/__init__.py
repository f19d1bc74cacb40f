"""`bridge-fgo bench`: resident training, this package and its peers, in turn on the same GPUs."""
