"""Packing: each sequence once and whole, in full rows, with the results of sequences alone."""

import functools
import importlib.util
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close

import jaxrnn
from jaxrnn import cells, recurrence
from jaxrnn.data import Prefetch, choose_row_length, pack, packed_batches

I, H = 3, 4  # noqa: E741  (the axis letter of the library)
SCRIPTS = Path(__file__).parent.parent / "scripts"

some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@pytest.fixture(autouse=True)
def quick_compile():
    with table.quick_compile():
        yield


def numbered(lengths):
    """Sequences whose steps say what they are: (number of the sequence, step)."""
    return [
        np.stack([np.full(length, i), np.arange(length)], axis=1)
        for i, length in enumerate(lengths)
    ]


def sequences(lengths, features=I, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(length, features)).astype(dtype) for length in lengths]


# The plan.


@given(some_lengths, st.integers(0, 30))
def test_each_sequence_lies_whole_in_one_row(lengths, longer):
    row_length = max(lengths) + longer
    packing = pack(lengths, row_length)
    owner = np.full(packing.shape, -1)
    for i, length in enumerate(lengths):
        row, start = packing.row[i], packing.start[i]
        assert start + length <= row_length
        taken = owner[row, start : start + length]
        assert len(taken) == length
        assert (taken == -1).all()
        taken[:] = i
    np.testing.assert_array_equal(packing.sequences, owner)
    np.testing.assert_array_equal(packing.mask, owner >= 0)
    np.testing.assert_array_equal(packing.row_lengths, packing.mask.sum(axis=1))
    # A row is real from its front on, and starts anew exactly where its owner changes.
    changes = np.diff(owner, axis=1, prepend=-1) != 0
    np.testing.assert_array_equal(packing.resets, changes & packing.mask)
    ends = np.diff(owner, axis=1, append=-1) != 0
    np.testing.assert_array_equal(packing.ends, ends & packing.mask)
    assert packing.real_share == sum(lengths) / owner.size
    assert packing.row_lengths.min() > 0


@given(some_lengths, st.integers(0, 30))
def test_no_two_rows_would_fit_into_one(lengths, longer):
    """So all rows but one are more than half full."""
    packing = pack(lengths, max(lengths) + longer)
    emptiest = np.sort(packing.row_lengths)[:2]
    assert len(emptiest) == 1 or emptiest.sum() > packing.shape[1]


@given(some_lengths, st.integers(0, 30))
def test_what_is_put_in_comes_out(lengths, longer):
    packing = pack(lengths, max(lengths) + longer)
    steps = numbered(lengths)
    both = packing.scatter([(s, s[:, 0] + 0.5) for s in steps])
    np.testing.assert_array_equal(both[1], np.where(packing.mask, packing.sequences + 0.5, 0))
    for rows, time_major in ((both[0], False), (both[0].swapaxes(0, 1), True)):
        for got, want in zip(packing.gather(rows, time_major=time_major), steps, strict=True):
            np.testing.assert_array_equal(got, want)


def log_normal_lengths():
    lengths = 90 * np.random.default_rng(0).lognormal(size=1000)
    return np.round(lengths).clip(17, 893).astype(int)


@pytest.mark.parametrize("batch_size", [1, 16, 32])
def test_at_least_95_percent_of_the_steps_are_real(batch_size):
    lengths = log_normal_lengths()
    row_length = choose_row_length(lengths, batch_size)
    rows = pack(lengths, row_length).shape[0]
    batches = -(-rows // batch_size)
    assert 893 <= row_length < 2 * 893
    assert lengths.sum() / (batches * batch_size * row_length) > 0.98


def test_too_few_sequences_for_a_batch_have_rows_of_the_longest():
    assert choose_row_length([3, 7, 2], 8) == 7
    assert pack([3, 7, 2]).shape == (2, 7)


def test_bad_plans_are_refused():
    with pytest.raises(ValueError, match="sequence 1 has 7 steps and a row has 5"):
        pack([3, 7], 5)
    with pytest.raises(ValueError, match="at least one step, but number 1 has 0"):
        pack([3, 0])
    with pytest.raises(ValueError, match="at least one sequence, got float64"):
        pack([])
    with pytest.raises(ValueError, match="row_length should be a whole number"):
        pack([3], 0)
    with pytest.raises(ValueError, match="plan is for 2 sequences, got 1"):
        pack([3, 2]).scatter([np.zeros(3)])
    with pytest.raises(ValueError, match=r"\[2, 1\], got \[3, 1\]"):
        pack([3, 2]).scatter([np.zeros((3, 1))] * 2)
    with pytest.raises(ValueError, match=r"\[2, 1\], got \[2\]"):
        pack([3, 2]).scatter([np.zeros((3, 1)), np.zeros(2)])
    with pytest.raises(ValueError, match="lookahead"):
        packed_batches([], 5, 2, lookahead=0)


# The same results as a batch that is padded.


def one_a_row(packing, row_length):
    """The plan that is no packing, with as many rows as sequences."""
    count = len(packing.lengths)
    start = np.zeros(count, np.int32)
    return packing._replace(row=np.arange(count), start=start, shape=(count, row_length))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("kind", "bidirectional"), [("LSTM", False), ("GRU", True)])
def test_outputs_and_gradients_are_those_of_padding(kind, bidirectional, dtype):
    lengths = [5, 2, 7, 1, 4, 3]
    with jax.enable_x64(dtype == np.float64):
        options = {"num_layers": 2, "bidirectional": bidirectional, "param_dtype": dtype}
        layer = getattr(jaxrnn, kind)(I, H, rngs=nnx.Rngs(0), **options)
        features = H * (1 + bidirectional)
        x, dy = sequences(lengths, dtype=dtype), sequences(lengths, features, dtype)

        @jax.jit
        @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
        def gradients(params, x, dy, lengths, resets):
            y, state = layer.stack.apply(params, x, None, lengths=lengths, resets=resets)
            return (y * dy).sum(), (y, state)

        def run(packing):
            arrays = packing.scatter(x), packing.scatter(dy), packing.row_lengths, packing.resets
            (dparams, dx), (y, state) = gradients(layer.parameters(), *arrays)
            assert dx.dtype == dtype
            return dparams, packing.gather(dx), packing.gather(y), y, state

        packing = pack(lengths, 9)
        assert packing.shape[0] == 3
        # As many rows as in the padded batch, so that both are one program.
        packing = packing.rows(np.arange(3), len(lengths))
        *got, y, _ = run(packing)
        *want, _, state = run(one_a_row(packing, 9))
        size = sum(lengths) * features
        assert_close(got, want, dtype, size=size)
        # What a cell gives out is its h, so that the last h of the upper layer can be had from y.
        if bidirectional:
            halves = jnp.split(y, 2, axis=-1)
            h = [packing.at_final_steps(a, reverse=r) for a, r in zip(halves, (0, 1), strict=True)]
            assert_close(h, [a.h for a in state[-1]], dtype, size=size)
        else:
            assert_close(packing.at_final_steps(y), state[-1].h, dtype, size=size)


@jax.jit
def lstm_step(params, x, state, starts, mask):
    """A step of the LSTM; rows that start anew do so from 0."""
    state = jax.tree.map(lambda a: jnp.where(starts[:, None], 0, a), state)
    y, state = recurrence(cells.lstm(), params, x[None], state, mask=mask[None])
    return y[0], state


def history_by_hand(params, x, packing, reverse):
    """Outputs and the states after each step, ``[T, B, ...]``: a Python loop over single steps."""
    steps, batch = x.shape[:2]
    starts = (packing.ends if reverse else packing.resets).T
    state = cells.lstm().init_state(params, batch, jnp.float32)
    found = [None] * steps
    for t in reversed(range(steps)) if reverse else range(steps):
        y, state = lstm_step(params, x[t], state, starts[t], packing.mask.T[t])
        found[t] = y, state
    return jax.tree.map(lambda *a: np.stack(a), *found)


def test_final_states_of_all_layers_and_both_directions():
    lengths, features = [5, 2, 7, 1, 4, 3], 2 * H
    x, packing = sequences(lengths, features), pack(lengths, 9)
    # As many rows as in the padded batch, so that both are one program.
    packing = packing.rows(np.arange(packing.shape[0]), len(lengths))
    options = {"num_layers": 2, "bidirectional": True}
    layer = jaxrnn.LSTM(features, H, rngs=nnx.Rngs(0), **options)
    params, rows, history = layer.parameters(), packing.scatter(x).swapaxes(0, 1), []
    for index in range(2):
        both = [
            history_by_hand(params[f"layer_{index}"][direction], rows, packing, reverse)
            for direction, reverse in (("forward", False), ("backward", True))
        ]
        rows = np.concatenate([y for y, _ in both], axis=-1)
        history.append(tuple(states for _, states in both))
    apply = jax.jit(functools.partial(layer.stack.apply, return_states=True))

    def run(plan):
        flags = {"lengths": plan.row_lengths, "resets": plan.resets}
        return apply(params, plan.scatter(x), None, **flags)

    _, want, _ = run(one_a_row(packing, 9))
    _, _, states = run(packing)
    by_hand = packing.final_states(tuple(history), time_major=True)
    for got in (by_hand, packing.final_states(states)):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert_close(got, want, size=8 * H)
    got = packing.final_states(tuple(forward for forward, _ in states))
    assert_close(got, [forward for forward, _ in want], size=8 * H)


# Batches.


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 20), max_size=60),
    st.integers(1, 5),
    st.none() | st.integers(1, 30),
    st.integers(0, 3),
)
def test_batches_have_each_sequence_once(lengths, batch_size, lookahead, seed):
    steps, shape = numbered(lengths), (batch_size, 23)
    options = {"lookahead": lookahead, "seed": seed}
    batches = list(packed_batches(iter(steps), 23, batch_size, **options))
    found = {}
    for batch in batches:
        assert batch.mask.shape == batch.resets.shape == batch.sequences.shape == shape
        assert batch.data.shape == (*shape, 2)
        np.testing.assert_array_equal(batch.mask, batch.sequences >= 0)
        assert not batch.data[~batch.mask].any()
        packing = batch.packing
        np.testing.assert_array_equal(packing.mask, batch.mask)
        np.testing.assert_array_equal(packing.resets, batch.resets)
        np.testing.assert_array_equal(packing.sequences, batch.sequences)
        for number, got in zip(packing.sequence, packing.gather(batch.data), strict=True):
            assert number not in found
            found[int(number)] = got
    assert sorted(found) == list(range(len(lengths)))
    for number, got in found.items():
        np.testing.assert_array_equal(got, steps[number])
    # None but the last one has an empty row, and the same seed gives the same batches.
    assert all(batch.mask.any(axis=1).all() for batch in batches[:-1])
    for batch, again in zip(batches, packed_batches(steps, 23, batch_size, **options), strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, again)


def test_a_stream_without_end_is_packed_nearly_full():
    lengths = itertools.cycle(log_normal_lengths())
    stream = (np.zeros((length, 1), np.float32) for length in lengths)
    batches = list(itertools.islice(packed_batches(stream, 893, 16, lookahead=256), 8))
    assert np.mean([batch.mask for batch in batches]) > 0.95


def test_the_order_of_rows_depends_on_seed_and_epoch():
    steps = numbered(np.random.default_rng(0).integers(1, 20, 50))

    def first(**options):
        return next(packed_batches(steps, 20, 8, **options)).sequences.tolist()

    assert first() == first(seed=0, epoch=0)
    assert len({str(first(seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_a_prefetched_batch_still_knows_where_its_sequences_lie():
    steps = numbered([3, 5, 2])
    with Prefetch(packed_batches(steps, 8, 2)) as prefetch:
        (batch,) = prefetch
    assert isinstance(batch.data, jax.Array)
    packing = batch.packing
    for number, got in zip(packing.sequence, packing.gather(batch.data), strict=True):
        np.testing.assert_array_equal(got, steps[number])


# scripts/bench_packing.py


def test_the_benchmark_compares_three_ways(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    spec = importlib.util.spec_from_file_location("bench_packing", SCRIPTS / "bench_packing.py")
    bench_packing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench_packing)
    monkeypatch.setattr(bench_packing.bench, "limit_threads", lambda threads: None)
    bench_packing.main(["--quick", "--rounds", "1", "--json", str(tmp_path / "out.json")])
    assert "sequences/s" in capsys.readouterr().out
    results = json.loads((tmp_path / "out.json").read_text("utf-8"))["results"]
    assert [row["name"] for row in results] == ["padding", "bucketing", "packing"]
    assert results[0]["ratio_to_padding"] == 1
    assert results[2]["shapes"] == 1
    assert results[2]["real_share"] > results[0]["real_share"]
