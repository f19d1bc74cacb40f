"""`bridge-fgo report`: one HTML page of runs that are over."""
