"""Subcommands of `lnn-lightning` that Lightning does not have."""
