"""Files of tuned weights that other programs load."""
