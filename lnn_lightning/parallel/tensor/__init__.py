"""Layers whose parts live on several ranks: tensor parallelism in plain torch."""
