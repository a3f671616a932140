"""What goes wrong with checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete, damaged or not one of ours, or could not be written."""
