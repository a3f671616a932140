"""Data parallelism of a stage."""
