"""The strategies that users name in ``Trainer(strategy=...)``."""
