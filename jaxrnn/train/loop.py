"""The training loop."""

import contextlib
import pathlib
from typing import NamedTuple

import jax
from flax import nnx

from jaxrnn.data import Corpus
from jaxrnn.train import report, rundir
from jaxrnn.train.build import (
    count_windows,
    make_corpus,
    make_devices,
    make_model,
)
from jaxrnn.train.checkpoint import Checkpoints, has_checkpoint
from jaxrnn.train.config import Config, check_config
from jaxrnn.train.errors import UserError
from jaxrnn.train.evaluation import make_evaluate
from jaxrnn.train.live import LiveLine
from jaxrnn.train.metrics import Meter
from jaxrnn.train.optimizer import cut_rate, make_optimizer, make_schedule
from jaxrnn.train.records import Records
from jaxrnn.train.signals import StopSignal
from jaxrnn.train.state import Progress, initial_state
from jaxrnn.train.step import make_train_step
from jaxrnn.train.streams import eval_stream, training_stream


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        directory: the run's directory.
        progress: where it stands.
        signal: the signal that stopped it, or None.
    """

    directory: pathlib.Path
    progress: Progress
    signal: int | None = None


def run(config: Config) -> Outcome:
    """Trains a language model as a config says, or goes on with a run that was stopped.

    Raises:
        UserError: something that the user can mend; what has been saved stays.
    """
    check_config(config)
    mesh = make_devices(config)
    corpus = make_corpus(config.data)
    total_steps = count_steps(config, corpus)
    model = make_model(config, len(corpus.vocabulary), config.run.seed)
    graphdef = nnx.graphdef(model)
    schedule = make_schedule(config.optimizer, total_steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    train_step = make_train_step(
        graphdef,
        optimizer,
        schedule,
        mesh,
        padded=config.data.random_bptt,
        bptt=config.data.bptt if config.data.scale_rate else 0,
        micro_batches=config.parallel.accumulate,
    )
    evaluate = make_evaluate(graphdef, mesh)
    state = initial_state(
        model,
        optimizer,
        mesh,
        config.data.batch_size,
        config.run.seed,
        loss_scale=config.precision.loss_scale if model.policy.needs_loss_scale else 0.0,
    )

    with contextlib.ExitStack() as stack:
        if config.precision.matmul == "tf32":
            stack.enter_context(jax.default_matmul_precision("tensorfloat32"))
        live = stack.enter_context(LiveLine(total_steps))
        live.say(corpus.banner or f"corpus {corpus.name}: {corpus.source}")
        about = rundir.describe(config, corpus)
        directory = open_directory(config, corpus, about)
        checkpoints = stack.enter_context(Checkpoints(directory, config.run.keep, about.to_dict()))
        state, progress = checkpoints.restore_latest(state) or (state, Progress())
        if finish_reason(config.run, progress) and report.exists(directory):
            live.say(f"this run is finished, nothing changes; see {directory / report.NAME}")
            return Outcome(directory, progress)
        greet(live, checkpoints, directory, progress)
        checkpoints.align_best(state.params, progress)
        rundir.write(directory, about, corpus.vocabulary)
        report.remove(directory)
        records = stack.enter_context(Records(directory, progress.step, config.run.tensorboard))
        meter = Meter(corpus.name, progress, records, count_windows(config, corpus))
        stream = stack.enter_context(training_stream(config, corpus, progress, mesh))
        stop = stack.enter_context(StopSignal())

        while not stop.number and not finish_reason(config.run, progress):
            state, metrics = train_step(state, next(stream))
            epoch_over = progress.advance(stream.position)
            validate, best = epoch_over or progress.step == config.run.steps, False
            meter.add(metrics, stream.waited)
            if progress.step % config.run.log_every == 0:
                live.training(meter.record_training(stream.waited))
            if validate:
                score = evaluate(state.params, eval_stream(config.data, corpus, "valid", mesh))
                record = meter.record_validation(score)
                best = progress.observe(score.loss, record["epoch"])
                live.validation(record, best)
                state = cut_rate(config.optimizer, state, progress)
                meter.restart_speed(stream.waited)
            if validate or progress.step % config.run.checkpoint_every == 0:
                # Fetches the losses first: what is not finite is never saved.
                meter.collect()
                checkpoints.save_latest(state, progress)
            if best:
                checkpoints.save_best(state.params, progress)

        if stop.number:
            meter.collect()
            checkpoints.save_latest(state, progress)
            checkpoints.wait()
            live.say(
                f"stopped and saved at step {progress.step:,} in {directory}; the same command "
                "goes on from there"
            )
            return Outcome(directory, progress, stop.number)

        # A run whose steps were cut below what it had done may end without a validation.
        best_params = checkpoints.restore_best(state.params) or state.params
        score = evaluate(best_params, eval_stream(config.data, corpus, "test", mesh))
        meter.record_test(score)
        report.write(directory, about, progress, finish_reason(config.run, progress))
        live.say(f"test perplexity {score.perplexity:,.2f}; see {directory / report.NAME}")
        return Outcome(directory, progress)


def open_directory(config: Config, corpus: Corpus, about: rundir.About) -> pathlib.Path:
    """Returns the run's directory, once it is clear that this config may use it.

    Raises:
        UserError: it holds another run, or any run where `run.resume` is off.
    """
    directory = rundir.run_directory(config, corpus)
    if has_checkpoint(directory, "latest"):
        if not config.run.resume:
            raise UserError(
                f"{directory} already holds a run; set config.run.resume=True to go on with it, "
                "or start another one with --config.run.dir"
            )
        rundir.check_same_run(directory, about, corpus.vocabulary)
    elif has_checkpoint(directory, "best"):
        raise UserError(
            f"{directory} has the best checkpoint of a run and none to go on from; start another "
            "run with --config.run.dir"
        )
    return directory


def greet(
    live: LiveLine, checkpoints: Checkpoints, directory: pathlib.Path, progress: Progress
) -> None:
    """Says whether the run is new, and what was found damaged where it is not."""
    for note in checkpoints.notes:
        live.say(note)
    if progress.step:
        live.say(f"going on in {directory} after step {progress.step:,}, epoch {progress.epoch}")
    else:
        live.say(f"a new run in {directory}")


def count_steps(config: Config, corpus: Corpus) -> int:
    """Returns the steps of the whole run; with random windows an estimate from the first epoch."""
    steps = config.run.epochs * count_windows(config, corpus)(0)
    return min(steps, config.run.steps) if config.run.steps else steps


def finish_reason(config: Config, progress: Progress) -> str:
    """Returns why the run is over, a phrase for the report; empty where it is not.

    Args:
        config: the `run` group.
        progress: where the run stands.
    """
    if config.steps and progress.step >= config.steps:
        return f"after run.steps = {config.steps:,}"
    if progress.epoch >= config.epochs:
        return f"after run.epochs = {config.epochs}"
    if config.early_stop and progress.epochs_since_best >= config.early_stop:
        return f"early, after {config.early_stop} epochs without improvement"
    return ""
