"""What a finished run leaves to read: report.md and perplexity.png."""

import pathlib
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from jaxrnn.train.config import differences, get_option
from jaxrnn.train.evaluation import perplexity
from jaxrnn.train.live import duration
from jaxrnn.train.records import is_final, read_records
from jaxrnn.train.rundir import About, write_text
from jaxrnn.train.state import Progress

NAME = "report.md"
PLOT = "perplexity.png"


def exists(directory: pathlib.Path) -> bool:
    """Tells whether a run's directory has a report."""
    return (directory / NAME).is_file()


def remove(directory: pathlib.Path) -> None:
    """Removes the report of a run that goes on: it would tell of fewer steps than were done."""
    (directory / NAME).unlink(missing_ok=True)


def write(directory: pathlib.Path, about: About, progress: Progress, reason: str) -> None:
    """Writes the report and its plot from metrics.jsonl.

    Args:
        directory: the run's directory.
        about: config, corpus, versions and machine.
        progress: where the run ended.
        reason: why it ended, a phrase.
    """
    records = read_records(directory / "metrics.jsonl")
    plot(records, about.corpus).savefig(directory / PLOT, dpi=150)
    sections = [
        f"# {about.corpus}: {about.config.model.cell.upper()} language model",
        _figures(records, about.corpus, progress, reason),
        f"![Perplexity of training and validation]({PLOT})",
        "## Epochs\n\n" + _epochs(records, about.corpus),
        "## Corpus\n\n" + about.source,
        "## Options that are not at their default\n\n" + _options(about),
        "## Machine and versions\n\n" + _machine(about),
    ]
    write_text(directory / NAME, "\n\n".join(sections) + "\n")


def plot(records: list[dict[str, Any]], corpus: str) -> Figure:
    """Returns the figure: perplexity of training and validation over epochs, on a log scale.

    Args:
        records: the records of a metrics.jsonl.
        corpus: name of the corpus.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    train = _series(records, f"{corpus}/train_perplexity")
    valid = _series(records, f"{corpus}/valid_perplexity")
    axes.plot(*train, color="#9bb8d3", linewidth=1.0, label="training")
    axes.plot(*valid, color="#c1440e", linewidth=2.0, marker="o", markersize=4, label="validation")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.1)
    axes.set(xlabel="epoch", ylabel="perplexity", title=_title(corpus, *valid))
    axes.grid(True, color="#e6e6e6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _title(corpus: str, epochs: list[float], perplexities: list[float]) -> str:
    if not perplexities:
        return corpus
    best = min(perplexities)
    return f"{corpus}: best validation {best:,.1f}, epoch {epochs[perplexities.index(best)]:g}"


def _series(records: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Returns the epochs and values of the records that have a figure."""
    found = [(record["epoch"], record[name]) for record in records if name in record]
    return [epoch for epoch, _ in found], [value for _, value in found]


def _figures(records: list[dict[str, Any]], corpus: str, progress: Progress, reason: str) -> str:
    test = next(r for r in records if is_final(r))
    speeds = sorted(r["tokens_per_second"] for r in records if "tokens_per_second" in r)
    rows = []
    if progress.best_loss is not None:
        rows.append(["Validation perplexity, best", f"{perplexity(progress.best_loss):,.2f}"])
        rows.append(["Best epoch", f"{progress.best_epoch:g} (step {progress.best_step:,})"])
    rows.append(["Test perplexity, at that epoch", f"{test[f'{corpus}/test_perplexity']:,.2f}"])
    rows.append(["Steps", f"{progress.step:,}, stopped {reason}"])
    rows.append(["Time", duration(progress.seconds)])
    if speeds:
        rows.append(["Tokens a second, median", f"{speeds[len(speeds) // 2]:,.0f}"])
    return _table(["", corpus], rows)


def _valid(record: dict[str, Any], corpus: str) -> bool:
    return f"{corpus}/valid_perplexity" in record


def _epochs(records: list[dict[str, Any]], corpus: str) -> str:
    rows = [
        [
            f"{r['epoch']:g}",
            f"{r['step']:,}",
            f"{r[f'{corpus}/train_epoch_perplexity']:,.2f}",
            f"{r[f'{corpus}/valid_perplexity']:,.2f}",
            duration(r["seconds"]),
        ]
        for r in records
        if _valid(r, corpus)
    ]
    return _table(["epoch", "step", "training perplexity", "validation perplexity", "time"], rows)


def _options(about: About) -> str:
    rows = [
        [f"`{name}`", f"`{value!r}`", f"`{get_option(name).default!r}`"]
        for name, value in differences(about.config).items()
    ]
    return _table(["option", "value", "default"], rows) if rows else "None."


def _machine(about: About) -> str:
    rows = [["machine", about.machine], *map(list, about.versions.items())]
    return _table(["", ""], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
