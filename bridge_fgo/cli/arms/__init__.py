"""Arms: child processes that each run one training and write its events, for the demo and the tests."""
