"""What public data tells about the curvature of the loss."""
