"""Batches are read ahead: the same ones, and no reader waits for a draw but the first."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from samplers import BatchSource, Shuffle

SEED = 2**130 + 1


def read(source, steps):
    return [(batch.indices, batch.weights) for step in steps for batch in source.passes(step)]


def draws_of(sampler, monkeypatch, before=lambda epoch: None):
    """The epochs that are drawn from now on, and by which thread."""
    drawn = []
    plan = type(sampler).plan

    def recording(self, seed, epoch):
        before(epoch)
        drawn.append((epoch, threading.current_thread() is threading.main_thread()))
        return plan(self, seed, epoch)

    monkeypatch.setattr(type(sampler), "plan", recording)
    return drawn


def test_reading_ahead_changes_no_batch_in_whatever_order(make):
    sampler = make(50, 7, 4)
    orders = [range(sampler.num_steps), reversed(range(sampler.num_steps)), [3, 9, 27, 26, 9, 12]]
    for steps in map(list, orders):
        ahead, plain = BatchSource(sampler, SEED, read_ahead=True), BatchSource(sampler, SEED)
        for got, expected in zip(read(ahead, steps), read(plain, steps), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_each_epoch_is_drawn_once_and_later_ones_in_background(make, monkeypatch):
    sampler = make(50, 7, 4)
    drawn = draws_of(sampler, monkeypatch)
    read(BatchSource(sampler, SEED, read_ahead=True), range(sampler.num_steps))
    needed = sorted({sampler.drawn_epoch(epoch) for epoch in range(sampler.epochs)})
    assert drawn == [(epoch, epoch == 0) for epoch in needed]


def test_the_next_epoch_is_drawn_while_this_one_is_read(monkeypatch):
    sampler = Shuffle(50, 7, 3)
    begun = threading.Event()
    draws_of(sampler, monkeypatch, lambda epoch: begun.set() if epoch == 1 else None)
    source = BatchSource(sampler, SEED, read_ahead=True)
    source.batch(0)
    assert begun.wait(30)  # and nobody asked for a batch of epoch 1


def test_a_draw_that_fails_in_the_background_fails_the_reader(monkeypatch):
    sampler = Shuffle(50, 7, 3)

    def fail(epoch):
        if epoch == 1:
            raise MemoryError("no room for a plan")

    draws_of(sampler, monkeypatch, fail)
    source = BatchSource(sampler, SEED, read_ahead=True)
    read(source, range(sampler.steps_per_epoch))
    with pytest.raises(MemoryError, match="no room"):
        source.batch(sampler.steps_per_epoch)
