"""The time loop: one call, several implementations."""

from jaxrnn.recurrence.api import recurrence

__all__ = ["recurrence"]
