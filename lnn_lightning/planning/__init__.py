"""What a layout needs, before it runs. Plain torch, no import of lightning."""
