"""What offloads the states of a rank: this package's own engine, and mcore's offloaders, by one protocol."""
