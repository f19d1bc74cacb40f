"""`bridge-fgo doctor`: what is installed, what a config will do here, and what is refused."""
