"""Partition, stages and schedules of the watched step."""
