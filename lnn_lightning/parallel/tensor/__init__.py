"""Tensor parallelism: planner, activations that know their shard, sharded layers, sequence parallelism."""
