"""Records of a run on disk: metrics.jsonl and TensorBoard's event files."""

# Protocol buffers make their classes when they are imported, where pyright does not see them.
# pyright: reportAttributeAccessIssue=false

import json
import pathlib
import time
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from jaxrnn.train.rundir import write_text


class Records:
    """Appends records to metrics.jsonl and, as scalars, to TensorBoard's files.

    A run that goes on keeps the records up to its step and drops those after it, which come again.
    """

    def __init__(self, directory: pathlib.Path, step: int, tensorboard: bool):
        """Opens the files.

        Args:
            directory: the run's directory.
            step: steps done so far.
            tensorboard: whether to write event files too.
        """
        path = directory / "metrics.jsonl"
        kept = [r for r in read_records(path) if r["step"] <= step and not is_final(r)]
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", encoding="utf-8")
        self._events = None
        if tensorboard:
            self._events = EventFileWriter(str(directory / "tensorboard"))
            # Tells TensorBoard to forget what an earlier process wrote for later steps.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._events.add_event(_event(step + 1, session_log=start))

    def write(self, record: dict[str, Any]) -> None:
        """Writes one record: numbers by name, one of them "step"."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._events is not None:
            scalars = [
                summary_pb2.Summary.Value(tag=name, simple_value=value)
                for name, value in record.items()
                if name != "step"
            ]
            summary = summary_pb2.Summary(value=scalars)
            self._events.add_event(_event(record["step"], summary=summary))
            self._events.flush()

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_records(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics.jsonl, without a last line that a kill cut short."""
    records = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def is_final(record: dict[str, Any]) -> bool:
    """Tells the record of the test text, which ends a run."""
    return any(name.endswith("/test_loss") for name in record)


def _event(step: int, **content: Any) -> event_pb2.Event:
    return event_pb2.Event(wall_time=time.time(), step=step, **content)
