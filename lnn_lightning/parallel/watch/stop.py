"""A stop that all ranks make at the same place, without a collective in the steps before it.

All ranks make the same checks in the same order (one a step), so the number of a check is a place they agree on. When
a stop is asked for, every rank promises not to go beyond its next check until it knows more; the highest of these
numbers is where all stop. The promises are made by a thread, so a rank that waits in a collective makes one too.
"""

from __future__ import annotations

import threading


class StopAgreement:
    """This rank's part of the agreement."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._checks = 0
        self._held: int | None = None
        self._target: int | None = None
        self._reasons: tuple[str, ...] = ()

    def check(self) -> tuple[str, ...]:
        """Main thread, at a place where all ranks can stop: the reasons if it is to be here, otherwise nothing."""
        with self._changed:
            self._checks += 1
            while self._held is not None and self._checks >= self._held:
                self._changed.wait()
            if self._target is None or self._checks < self._target:
                return ()
            reasons, self._target, self._reasons = self._reasons, None, ()
            return reasons

    def hold(self) -> int:
        """Promises to wait at the next check; returns its number."""
        with self._changed:
            self._held = self._checks + 1
            return self._held

    def decide(self, target: int, reasons: tuple[str, ...]) -> None:
        """The stop is at check number ``target``, or at the first one behind it."""
        with self._changed:
            self._held, self._target, self._reasons = None, target, reasons
            self._changed.notify_all()

    def decide_alone(self, reason: str) -> None:
        """There is nobody to ask: the next check."""
        self.decide(0, (reason,))

    def release(self) -> None:
        """Takes the promise back."""
        with self._changed:
            self._held = None
            self._changed.notify_all()
