"""One launch a step, for recurrent matrices that no multiprocessor can hold."""
