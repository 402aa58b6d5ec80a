"""What one backward pass leaves behind, and the clipped sum made from it."""
