"""Training: the loop, what is measured on the way, and exact evaluation."""
