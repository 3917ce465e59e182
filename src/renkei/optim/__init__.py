"""What is done with mean gradients."""
