"""Errors meant for the user: what is wrong, with which module and rank, and what to do."""


class ParallelError(RuntimeError):
    """Base class of the errors this package raises about a layout, a step or a stage."""


class LayoutError(ParallelError, ValueError):
    """The requested axis sizes do not fit each other or the number of processes."""


class StepError(ParallelError):
    """The user's step cannot be followed, cut or run as a pipeline."""


class AbsentValueError(StepError):
    """A value that lives on another stage is needed here and was not sent."""


class LostRankError(ParallelError):
    """Another rank is gone or failed, so this one cannot go on."""


class HangError(ParallelError):
    """A collective timed out; the message says what each rank was doing."""
