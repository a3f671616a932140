"""Mechanism: meshes, watched steps, pipelines. Plain torch, no Lightning."""
