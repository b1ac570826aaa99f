"""What a pass is made of."""
