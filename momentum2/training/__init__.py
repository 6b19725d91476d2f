"""Training: what a config comes to, the loop, and what is watched meanwhile."""
