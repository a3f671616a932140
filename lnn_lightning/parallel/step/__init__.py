"""The watched step: trace, units, live values, micro-batches."""
