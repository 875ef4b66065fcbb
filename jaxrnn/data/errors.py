"""The error that a data set which cannot be used raises."""


class DataError(ValueError):
    """A data set is missing, half-written, or not the one that its name says.

    The message is one sentence: what was found, what was wanted, what to do.
    """
