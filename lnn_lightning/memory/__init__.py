"""Memory: recomputation, compression of stored activations, offloading. Plain torch, no import of lightning."""
