"""Mixture of experts: gates, dispatch to the ranks that hold the experts, and adapters for blocks people write."""
