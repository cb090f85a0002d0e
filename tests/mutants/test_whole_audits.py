"""Whole audits at real sizes, each of a library into which one bug is planted.

A bug is planted where it would be made: some lines of one function of the library become others,
and the audit runs as it does before a run. A quick test sees that each can still be planted.
"""

# ruff: noqa: E501  lines that are planted are as long as they are

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planting import Bug, plant, planted

from dpsgd import FullSums, Mechanism, Platt, RootKey, dpsgd
from dpsgd.audit import audit as coupled
from dpsgd.audit.samplers.checks import sampler_checks
from samplers import (
    BallsAndBins,
    FullBatch,
    Multistage,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
    UnitTree,
    UserPoisson,
)

pytestmark = [pytest.mark.mutants, pytest.mark.usefixtures("unoptimised")]

STEPS = {
    "no noise at the last step of a full block": Bug(
        "dpsgd.engine.loop:_Step.__call__",
        "state, gradient = self.update(state, total, noise_key, scales, **how)",
        "other = type(scales)(scales.l2_clip_norm, jnp.where(j == plan.starts.shape[0] - 2, 0.0, 1.0) * scales.noise_stddev, scales.expected_batch_size, scales.grid, scales.noise)\n    state, gradient = self.update(state, total, noise_key, other, **how)",
        "blocks are given the keys, scales and steps of the run",
    ),
    "no noise at the first step of a block": Bug(
        "dpsgd.engine.loop:_Step.__call__",
        "state, gradient = self.update(state, total, noise_key, scales, **how)",
        "other = type(scales)(scales.l2_clip_norm, jnp.where(j == 0, 0.0, 1.0) * scales.noise_stddev, scales.expected_batch_size, scales.grid, scales.noise)\n    state, gradient = self.update(state, total, noise_key, other, **how)",
        "noise is what key, step and place give, in every leaf",
    ),
    "no noise in blocks that are not full": Bug(
        "dpsgd.engine.loop:_Step.__call__",
        "state, gradient = self.update(state, total, noise_key, scales, **how)",
        "other = type(scales)(scales.l2_clip_norm, jnp.where(plan.num_steps < plan.starts.shape[0] - 1, 0.0, 1.0) * scales.noise_stddev, scales.expected_batch_size, scales.grid, scales.noise)\n    state, gradient = self.update(state, total, noise_key, other, **how)",
        "noise is what key, step and place give, in every leaf",
    ),
    "no noise at the first step of the run": Bug(
        "dpsgd.engine.loop:_Step.__call__",
        "state, gradient = self.update(state, total, noise_key, scales, **how)",
        "other = type(scales)(scales.l2_clip_norm, jnp.where(state.step == 0, 0.0, 1.0) * scales.noise_stddev, scales.expected_batch_size, scales.grid, scales.noise)\n    state, gradient = self.update(state, total, noise_key, other, **how)",
        "noise is what key, step and place give, in every leaf",
    ),
    "no noise in every 50th step": Bug(
        "dpsgd.engine.loop:_Step.__call__",
        "state, gradient = self.update(state, total, noise_key, scales, **how)",
        "other = type(scales)(scales.l2_clip_norm, jnp.where(state.step % 50 == 49, 0.0, 1.0) * scales.noise_stddev, scales.expected_batch_size, scales.grid, scales.noise)\n    state, gradient = self.update(state, total, noise_key, other, **how)",
        "blocks are given the keys, scales and steps of the run",
    ),
    "half the noise for batches above 16": Bug(
        "dpsgd.engine.loop:_Step.__call__",
        "state, gradient = self.update(state, total, noise_key, scales, **how)",
        "other = type(scales)(scales.l2_clip_norm, scales.noise_stddev / (1 + (plan.indices.shape[1] > 16)), scales.expected_batch_size, scales.grid, scales.noise)\n    state, gradient = self.update(state, total, noise_key, other, **how)",
        "noise is what key, step and place give, in every leaf",
    ),
    "less noise for small batches": Bug(
        "dpsgd.engine.loop:_Step.__call__",
        "state, gradient = self.update(state, total, noise_key, scales, **how)",
        "other = type(scales)(scales.l2_clip_norm, jnp.where(diagnostics.batch_size < 4, 0.5, 1.0) * scales.noise_stddev, scales.expected_batch_size, scales.grid, scales.noise)\n    state, gradient = self.update(state, total, noise_key, other, **how)",
        "noise and divisor do not depend on the batch",
    ),
    "less noise for large batches": Bug(
        "dpsgd.engine.loop:_Step.__call__",
        "state, gradient = self.update(state, total, noise_key, scales, **how)",
        "other = type(scales)(scales.l2_clip_norm, jnp.where(diagnostics.batch_size > plan.indices.shape[1] / 2, 0.5, 1.0) * scales.noise_stddev, scales.expected_batch_size, scales.grid, scales.noise)\n    state, gradient = self.update(state, total, noise_key, other, **how)",
        "noise and divisor do not depend on the batch",
    ),
    "the step within the block names the noise": Bug(
        "dpsgd.engine.loop:_Step.__call__",
        "state, gradient = self.update(state, total, noise_key, scales, **how)",
        "before = state.step\n    state, gradient = self.update(state._replace(step=j), total, noise_key, scales, **how)\n    state = state._replace(step=before + 1)",
        "noise is what key, step and place give, in every leaf",
    ),
    "no noise in the first block after a resume": Bug(
        "dpsgd.engine.loop:train_blocks",
        "            arguments = now, rows, plan, noise_key, scales, watch, loss_key, laws\n",
        "            resumed = int(now.step) == steps.start > 0 and not under_way\n            import dataclasses\n            faint = dataclasses.replace(scales, noise_stddev=np.float32(2.0**-100))\n            arguments = (now, rows, plan, noise_key, faint if resumed else scales, watch,\n                         loss_key, laws)\n",
        "blocks are given the keys, scales and steps of the run",
    ),
    "a public key from the second block on": Bug(
        "dpsgd.engine.loop:train_blocks",
        "            arguments = now,",
        "            noise_key = noise_key * np.uint32(not under_way)\n            arguments = now,",
        "blocks are given the keys, scales and steps of the run",
    ),
    "the key of the first generation for all": Bug(
        "dpsgd.engine.loop:train_blocks",
        "_keys(algorithm, mechanism, root, generation)",
        "_keys(algorithm, mechanism, root, 0)",
        "blocks are given the keys, scales and steps of the run",
    ),
    "the noise of a block used for the next one as well": Bug(
        "dpsgd.engine.loop:_run_block",
        "    return jax.lax.fori_loop(0, plan.num_steps, one_step, (state, log, watched))",
        "    first = state.step\n    state = state._replace(step=first // 128 * 64 + first % 64)\n    state, log, watched = jax.lax.fori_loop(\n        0, plan.num_steps, one_step, (state, log, watched))\n    return state._replace(step=first + plan.num_steps), log, watched",
        "noise is what key, step and place give, in every leaf",
    ),
    "every block trains on the first one's batches": Bug(
        "dpsgd.engine.loop:_inputs",
        "    for steps, plan in plan_blocks(source, **how):\n",
        "    first = None\n    for steps, plan in plan_blocks(source, **how):\n        plan = first = plan if first is None else first\n",
        "blocks train on the batches that are drawn",
    ),
    "leaves k and k + 16 share noise": Bug(
        "dpsgd.noise.gaussian:_words",
        '_word(leaf, "leaf")',
        '(_word(leaf, "leaf") % 16)',
        "noise is what key, step and place give, in every leaf",
        "leaves",
    ),
    "leaves k and k + 32 share noise": Bug(
        "dpsgd.noise.gaussian:_words",
        '_word(leaf, "leaf")',
        '(_word(leaf, "leaf") % 32)',
        "noise is what key, step and place give, in every leaf",
        "leaves",
    ),
    "the last leaf has the noise of the first": Bug(
        "dpsgd.noise.gaussian:add_gaussian_noise",
        "names = [_names(part, lined) for part in parts]",
        "names = [_names(part, lined) for part in parts]\n        names = [(jnp.where(jnp.asarray(leaf) == len(totals) - 1, 0, leaf).astype(jnp.uint32), at) for leaf, at in names]",
        "noise is what key, step and place give, in every leaf",
    ),
    "one noise for leaves of equal size": Bug(
        "dpsgd.noise.gaussian:add_gaussian_noise",
        "names = [_names(part, lined) for part in parts]",
        "sizes = [total.size for total in totals]\n        numbers = jnp.array([sizes.index(size) for size in sizes], jnp.uint32)\n        names = [_names(part, lined) for part in parts]\n        names = [(numbers[leaf], place) for leaf, place in names]",
        "noise is what key, step and place give, in every leaf",
        "leaves",
    ),
    "no noise in leaves above 2^20": Bug(
        "dpsgd.noise.gaussian:add_gaussian_noise",
        "(whole + rounded) * spacing",
        "(whole + rounded * (total.size <= 2**20)) * spacing",
        "noise is what key, step and place give, in every leaf",
        "leaves",
    ),
    "half the noise in leaves of one entry": Bug(
        "dpsgd.noise.gaussian:add_gaussian_noise",
        "stddev = jnp.asarray(stddev, jnp.float32)",
        "stddev = jnp.asarray(stddev, jnp.float32)\n    ones = [leaf for leaf, total in enumerate(leaves) if total.size == 1]\n    inner = lax.platform_dependent\n    leaves = [x * (2.0 if k in ones else 1.0) for k, x in enumerate(leaves)]",
        "an example moves the sum by at most C",
    ),
    "step number mod 64": Bug(
        "dpsgd.noise.gaussian:add_gaussian_noise",
        '_word(step, "step")',
        '_word(step, "step") % 64',
        "noise is what key, step and place give, in every leaf",
    ),
    "step number mod 256": Bug(
        "dpsgd.noise.gaussian:add_gaussian_noise",
        '_word(step, "step")',
        '_word(step, "step") % 256',
        "noise is what key, step and place give, in every leaf",
    ),
    "step number mod 1000": Bug(
        "dpsgd.noise.gaussian:add_gaussian_noise",
        '_word(step, "step")',
        '_word(step, "step") % 1000',
        "noise is what key, step and place give, in every leaf",
    ),
    "step and leaf are interchangeable": Bug(
        "dpsgd.noise.gaussian:_words",
        '        zero + (_word(leaf, "leaf") ^ noise_key[2]),\n        zero + (_word(step, "step") ^ noise_key[3]),\n',
        '        zero + ((_word(leaf, "leaf") + _word(step, "step")) ^ noise_key[2]),\n        zero + ((_word(leaf, "leaf") * _word(step, "step")) ^ noise_key[3]),\n',
        "noise is what key, step and place give, in every leaf",
    ),
    "the noise repeats every 4096 coordinates": Bug(
        "dpsgd.noise.gaussian:_words",
        "    zero = jnp.zeros(shape, jnp.uint32)\n",
        "    zero = jnp.zeros(shape, jnp.uint32)\n    position, one_axis = (jnp.arange(\n        math.prod(shape), dtype=jnp.uint32).reshape(shape) if position is None else position) % 4096, True\n",
        "noise is what key, step and place give, in every leaf",
    ),
    "no noise in the second half of a leaf": Bug(
        "dpsgd.noise.gaussian:_rounded_noise",
        "below = jnp.floor(scaled)",
        "scaled = scaled * jnp.where(jnp.arange(scaled.size).reshape(scaled.shape) < max(64, scaled.size // 2), 1, 0)\n    below = jnp.floor(scaled)",
        "noise is what key, step and place give, in every leaf",
    ),
    "no noise in the last entry of large leaves": Bug(
        "dpsgd.noise.gaussian:_rounded_noise",
        "below = jnp.floor(scaled)",
        "scaled = jnp.where((jnp.arange(scaled.size) == scaled.size - 1).reshape(scaled.shape) & (scaled.size > 4096), 0.0, scaled)\n    below = jnp.floor(scaled)",
        "noise is what key, step and place give, in every leaf",
    ),
    "noise ends at 3 sigma": Bug(
        "dpsgd.noise.gaussian:_rounded_noise",
        "below = jnp.floor(scaled)",
        "scaled = jnp.clip(scaled, -3 * cells, 3 * cells)\n    below = jnp.floor(scaled)",
        "noise is what key, step and place give, in every leaf",
    ),
    "noise is 2 % too small": Bug(
        "dpsgd.noise.gaussian:_rounded_noise",
        "below = jnp.floor(scaled)",
        "scaled = 0.98 * scaled\n    below = jnp.floor(scaled)",
        "noise is what key, step and place give, in every leaf",
    ),
    "noise is a sum of 12 uniform numbers": Bug(
        "dpsgd.noise.gaussian:_rounded_noise",
        "below = jnp.floor(scaled)",
        "scaled = sum((w >> s & 0x3FF).astype(jnp.float32) - 511.5 for w in words for s in (0, 10, 20)) * (cells / 1024.0)\n    below = jnp.floor(scaled)",
        "noise is what key, step and place give, in every leaf",
    ),
    "noise is never negative": Bug(
        "dpsgd.noise.gaussian:_rounded_noise",
        "below = jnp.floor(scaled)",
        "scaled = jnp.abs(scaled)\n    below = jnp.floor(scaled)",
        "noise is what key, step and place give, in every leaf",
    ),
    "the key's words are not used": Bug(
        "dpsgd.noise.gaussian:_words",
        "return philox4x32(counter, (noise_key[0], noise_key[1]))",
        "return philox4x32((*counter[:2], *(jnp.bitwise_xor(c, k) for c, k in zip(counter[2:], noise_key[2:]))), (noise_key[0] * 0, noise_key[1] * 0))",
        "noise is what key, step and place give, in every leaf",
    ),
    "no noise in bfloat16 leaves": Bug(
        "dpsgd.engine.algorithm:_Update.__call__",
        "return updated(self.optimizer, state, gradient, frozen)",
        "raw = jax.tree.map(lambda s, p: (s / scales.expected_batch_size).astype(p.dtype), total, state.params)\n    gradient = jax.tree.map(lambda g, r: r if r.dtype == jnp.bfloat16 else g, gradient, raw)\n    return updated(self.optimizer, state, gradient, frozen)",
        "noise is what key, step and place give, in every leaf",
    ),
    "half the noise in bfloat16 leaves": Bug(
        "dpsgd.engine.algorithm:_Update.__call__",
        "return updated(self.optimizer, state, gradient, frozen)",
        "raw = jax.tree.map(lambda s, p: (s / scales.expected_batch_size).astype(p.dtype), total, state.params)\n    gradient = jax.tree.map(lambda g, r: (g + r.astype(g.dtype)) / 2 if r.dtype == jnp.bfloat16 else g, gradient, raw)\n    return updated(self.optimizer, state, gradient, frozen)",
        "noise is what key, step and place give, in every leaf",
    ),
    "momentum is made of sums without noise": Bug(
        "dpsgd.engine.algorithm:_Update.__call__",
        "return updated(self.optimizer, state, gradient, frozen)",
        "raw = jax.tree.map(lambda s, p: (s / scales.expected_batch_size).astype(p.dtype), total, state.params)\n    _, shown = updated(self.optimizer, state, gradient, frozen)\n    return updated(self.optimizer, state, raw, frozen)[0], shown",
        "the update sees the release alone",
    ),
    "the optimizer's state is made of sums without noise": Bug(
        "dpsgd.engine.algorithm:_Update.__call__",
        "return updated(self.optimizer, state, gradient, frozen)",
        "raw = jax.tree.map(lambda s, p: (s / scales.expected_batch_size).astype(p.dtype), total, state.params)\n    after, shown = updated(self.optimizer, state, gradient, frozen)\n    other, _ = updated(self.optimizer, state, raw, frozen)\n    return after._replace(opt_state=other.opt_state), shown",
        "the update sees the release alone",
    ),
    "a thousandth of the sum is added to the parameters": Bug(
        "dpsgd.engine.algorithm:_Update.__call__",
        "return updated(self.optimizer, state, gradient, frozen)",
        "raw = jax.tree.map(lambda s, p: (s / scales.expected_batch_size).astype(p.dtype), total, state.params)\n    after, shown = updated(self.optimizer, state, gradient, frozen)\n    params = jax.tree.map(lambda p, r: (p + 1e-3 * r).astype(p.dtype), after.params, raw)\n    return after._replace(params=params), shown",
        "the update sees the release alone",
    ),
    "the second moment sees the sum": Bug(
        "dpsgd.engine.algorithm:_Update.__call__",
        "return updated(self.optimizer, state, gradient, frozen)",
        "raw = jax.tree.map(lambda s, p: (s / scales.expected_batch_size).astype(p.dtype), total, state.params)\n    after, shown = updated(self.optimizer, state, gradient, frozen)\n    leaves, made = jax.tree.flatten(after.opt_state)\n    last = leaves[-1] + 1e-3 * jax.tree.leaves(raw)[-1].astype(leaves[-1].dtype)\n    opt_state = jax.tree.unflatten(made, [*leaves[:-1], last])\n    return after._replace(opt_state=opt_state), shown",
        "the update sees the release alone",
    ),
    "divided by the realised size": Bug(
        "dpsgd.engine.loop:_Step.__call__",
        "state, gradient = self.update(state, total, noise_key, scales, **how)",
        "other = type(scales)(scales.l2_clip_norm, scales.noise_stddev, jnp.maximum(1.0, diagnostics.batch_size), scales.grid, scales.noise)\n    state, gradient = self.update(state, total, noise_key, other, **how)",
        "an example moves the sum by at most C",
    ),
    "a step is the sum of its first pass": Bug(
        "dpsgd.engine.loop:_StepSum._sum",
        "plan.starts[j], plan.starts[j + 1], add, zeros",
        "plan.starts[j], plan.starts[j] + 1, add, zeros",
        "blocks train on the batches that are drawn",
        "sums",
    ),
    "sums over all rows: padding of the last pass counts": Bug(
        "dpsgd.engine.loop:_Batches.at",
        "weights = plan.weights[row].reshape(indices.shape[0], -1).max(axis=1)",
        "weights = jnp.ones(indices.shape[0])",
        "padding is inert",
        "sums",
    ),
    "sums over all rows: the statistic is not clipped": Bug(
        "dpsgd.engine.queries:sums_run",
        "algorithm = dpsgd(_Product(refinement), _folds(refinement))",
        "sound = dpsgd(_Product(refinement), _folds(refinement))\n        algorithm = sound._replace(clipped_sum=lambda p, b, w, s: sound.clipped_sum(p, b, w, type(s)(1e12 + 0 * s.l2_clip_norm, s.noise_stddev, s.expected_batch_size, s.grid, s.noise)))",
        "a lower C clips to it",
        "sums",
    ),
    "sums over all rows: gradient and Hessian are clipped by themselves": Bug(
        "dpsgd.engine.queries:sums_run",
        "algorithm = dpsgd(_Product(refinement), _folds(refinement))",
        "sound = dpsgd(_Product(refinement), _folds(refinement))\n        cut = [dpsgd(lambda p, r, mask=mask: _Product(refinement)(p | {'sum': p['sum'] * mask}, r), _folds(refinement)) for mask in (jnp.arange(5) < 2, jnp.arange(5) >= 2)]\n        def both_sums(p, b, w, s):\n            (one, log), (two, _) = (part.clipped_sum(p, b, w, s) for part in cut)\n            return jax.tree.map(jnp.add, one, two), log\n        algorithm = sound._replace(clipped_sum=both_sums)",
        "a lower C clips to it",
        "sums",
    ),
    "sums over all rows: no noise on the Hessian": Bug(
        "dpsgd.engine.algorithm:_Update.__call__",
        "return updated(self.optimizer, state, gradient, frozen)",
        "raw = total['sum'] / scales.expected_batch_size\n    gradient = gradient | {'sum': jnp.where(jnp.arange(5) < 2, gradient['sum'], raw)}\n    return updated(self.optimizer, state, gradient, frozen)",
        "noise is what key, step and place give, in every leaf",
        "sums",
    ),
    "sums over all rows: a tenth less noise": Bug(
        "dpsgd.noise.gaussian:_rounded_noise",
        "below = jnp.floor(scaled)",
        "scaled = 0.9 * scaled\n    below = jnp.floor(scaled)",
        "noise is what key, step and place give, in every leaf",
        "sums",
    ),
    "sums over all rows: the noise of one is used for the next": Bug(
        "dpsgd.noise.gaussian:add_gaussian_noise",
        '_word(step, "step")',
        '_word(step, "step") // 2',
        "noise is what key, step and place give, in every leaf",
        "sums",
    ),
    "sums over all rows: gradient and Hessian share noise": Bug(
        "dpsgd.engine.algorithm:_Update.__call__",
        "return updated(self.optimizer, state, gradient, frozen)",
        "raw = total['sum'] / scales.expected_batch_size\n    gradient = gradient | {'sum': raw + (gradient['sum'] - raw)[jnp.arange(5) % 3]}\n    return updated(self.optimizer, state, gradient, frozen)",
        "noise is what key, step and place give, in every leaf",
        "sums",
    ),
    "sums over all rows: the fold sees them without noise": Bug(
        "dpsgd.engine.algorithm:_Update.__call__",
        "return updated(self.optimizer, state, gradient, frozen)",
        "raw = jax.tree.map(lambda s, p: (s / scales.expected_batch_size).astype(p.dtype), total, state.params)\n    after, shown = updated(self.optimizer, state, gradient, frozen)\n    params = after.params | {'state': after.params['state'] + 0.01 * raw['sum'][:2]}\n    return after._replace(params=params), shown",
        "the update sees the release alone",
        "sums",
    ),
    "sums over all rows: divided by how many were clipped": Bug(
        "dpsgd.engine.loop:_Step.__call__",
        "state, gradient = self.update(state, total, noise_key, scales, **how)",
        "other = type(scales)(scales.l2_clip_norm, scales.noise_stddev, jnp.maximum(1.0, diagnostics.clipped_count), scales.grid, scales.noise)\n    state, gradient = self.update(state, total, noise_key, other, **how)",
        "noise and divisor do not depend on the batch",
        "sums",
    ),
    "sums over all rows: more of them than are priced": Bug(
        "dpsgd.core.mechanism:Mechanism.of_sums",
        "sums.count)",
        "2 * sums.count)",
        "they are released as they are priced",
        "sums",
    ),
    "the mechanism's scales with half the noise": Bug(
        "dpsgd.core.mechanism:Mechanism.scales",
        "stddev = np.float32(noise)",
        "noise = noise / 2\n    stddev = np.float32(noise)",
        "the program is given the scales of the configuration",
    ),
    "the mechanism's scales with twice the clip": Bug(
        "dpsgd.core.mechanism:Mechanism.scales",
        "return Scales(clip, stddev,",
        "return Scales(2 * clip, stddev,",
        "the program is given the scales of the configuration",
    ),
    "the mechanism's scales with 2 % more clip": Bug(
        "dpsgd.core.mechanism:Mechanism.scales",
        "return Scales(clip, stddev,",
        "return Scales(np.float32(1.02) * clip, stddev,",
        "the program is given the scales of the configuration",
    ),
    "the noise scaled to sigma, without C": Bug(
        "dpsgd.core.mechanism:Mechanism.scales",
        "noise = self.noise_multiplier * float(clip)",
        "noise = self.noise_multiplier * float(clip) ** 2",
        "the program is given the scales of the configuration",
    ),
    "the neighbour's norm in microbatches above 64": Bug(
        "dpsgd.gradients.clipping:clipped_grad",
        "factor = norms.clip_factor(norm, l2_clip_norm, real)",
        "norm = jax.tree.map(lambda x: jnp.roll(x, 1) if x.size > 64 else x, norm)\n        factor = norms.clip_factor(norm, l2_clip_norm, real)",
        "a lower C clips to it",
    ),
    "the last example of a microbatch is not clipped": Bug(
        "dpsgd.gradients.clipping:clipped_grad",
        "factor = norms.clip_factor(norm, l2_clip_norm, real)",
        "clip = jnp.where(jnp.arange(real.size) == real.size - 1, jnp.inf, l2_clip_norm)\n        factor = norms.clip_factor(norm, clip, real)",
        "an example is clipped wherever it lies",
    ),
    "the first example of a batch is not clipped": Bug(
        "dpsgd.gradients.clipping:clipped_grad",
        "factor = norms.clip_factor(norm, l2_clip_norm, real)",
        "first = (jnp.arange(real.size) == 0) & (so_far.batch_size == 0)\n        clip = jnp.where(first, jnp.inf, l2_clip_norm)\n        factor = norms.clip_factor(norm, clip, real)",
        "an example moves the sum by at most C",
    ),
    "microbatches after the first are not clipped": Bug(
        "dpsgd.gradients.clipping:clipped_grad",
        "factor = norms.clip_factor(norm, l2_clip_norm, real)",
        "clip = jnp.where(so_far.batch_size > 0, jnp.inf, l2_clip_norm)\n        factor = norms.clip_factor(norm, clip, real)",
        "the rows that are drawn are those that are read",
    ),
    "twice the clip in batches above 256": Bug(
        "dpsgd.gradients.clipping:clipped_grad",
        "        size = weights.shape[0] // devices\n",
        "        size = weights.shape[0] // devices\n        nonlocal l2_clip_norm\n        l2_clip_norm = l2_clip_norm * (1 + (size > 256))\n",
        "an example moves the sum by at most C",
    ),
    "gradients a thousand times too long are not clipped": Bug(
        "dpsgd.gradients.clipping:clipped_grad",
        "factor = norms.clip_factor(norm, l2_clip_norm, real)",
        "clip = jnp.where(norms.value(norm) > 1000 * l2_clip_norm, jnp.inf, l2_clip_norm)\n        factor = norms.clip_factor(norm, clip, real)",
        "noise and divisor do not depend on the batch",
    ),
    "the filling of the last microbatch counts": Bug(
        "dpsgd.gradients.clipping:clipped_grad",
        "jnp.where(jnp.arange(rows.size) < size, filled(weights), 0)",
        "filled(weights)",
        "an example moves the sum by at most C",
    ),
    "padding counts in one place": Bug(
        "dpsgd.gradients.clipping:clipped_grad",
        "real = weights > 0",
        "real = (weights > 0) | (jnp.arange(weights.size) == 7)",
        "a lower C clips to it",
    ),
    "padding counts where it is not row 0": Bug(
        "dpsgd.engine.loop:_Batches.at",
        "    batch = jax.tree.map(lambda column: column[indices], data)\n",
        "    weights = jnp.where(indices.reshape(weights.size, -1)[:, 0] > 0, 1.0, weights)\n    batch = jax.tree.map(lambda column: column[indices], data)\n",
        "a lower C clips to it",
    ),
    "leaves are clipped one by one": Bug(
        "dpsgd.gradients.norms:combine",
        "if len(norms) == 1:\n        return norms[0]\n",
        "if len(norms) > 0:\n        scale = functools.reduce(jnp.maximum, (n.scale for n in norms))\n        squares = [n.square * (n.scale / scale) ** 2 for n in norms]\n        return Norm(scale, functools.reduce(jnp.maximum, squares))\n",
        "an example moves the sum by at most C",
    ),
    "the norm leaves out the last leaf": Bug(
        "dpsgd.gradients.norms:combine",
        "if len(norms) == 1:\n        return norms[0]\n",
        "if len(norms) == 1:\n        return norms[0]\n    norms = norms[:-1]\n    if len(norms) == 1:\n        return norms[0]\n",
        "an example moves the sum by at most C",
    ),
    "repeated rows are summed after the norm": Bug(
        "dpsgd.gradients.ghost.parts:sum_repeated",
        "if count == 1:",
        "if count >= 1:",
        "an example moves the sum by at most C",
    ),
    "NaN counts as a number": Bug(
        "dpsgd.gradients.norms:select",
        "return jnp.where(_rows(factor.keep, x), x.astype(jnp.float32), 0.0)",
        "x = jnp.nan_to_num(x.astype(jnp.float32), nan=1.0)\n    return jnp.where(_rows(factor.keep | (factor.target > 0), x), x, 0.0)",
        "an example moves the sum by at most C",
    ),
    "passes after the first are not clipped": Bug(
        "dpsgd.engine.loop:_StepSum._sum",
        "return jax.tree.map(jnp.add, total, batch_sum(row))",
        "nonlocal scales\n        kept, scales = scales, type(scales)(\n            jnp.where(row > plan.starts[j], jnp.inf, scales.l2_clip_norm), scales.noise_stddev,\n            scales.expected_batch_size, scales.grid, scales.noise)\n        found = batch_sum(row)\n        scales = kept\n        return jax.tree.map(jnp.add, total, found)",
        "an example moves the sum by at most C",
        "passes",
    ),
}

DRAWS = {
    "a cut keeps the first rows": Bug(
        "samplers.truncation:cut",
        "members[np.sort(uniform_permutation(key, members.size)[:size])]",
        "members[:size]",
        "survivors of a cut are uniform",
        "poisson cut",
    ),
    "a cut spares the last rows": Bug(
        "samplers.truncation:cut",
        "members[np.sort(uniform_permutation(key, members.size)[:size])]",
        "members[-size:]",
        "survivors of a cut are uniform",
        "bins cut",
    ),
    "a cut drops the neighbours of one": Bug(
        "samplers.truncation:cut",
        "return members[np.sort(uniform_permutation(key, members.size)[:size])]",
        "begin = int(uniform_permutation(key, members.size)[0])\n    return np.sort(np.roll(members, begin)[:size])",
        "survivors of a cut are uniform",
        "poisson cut",
    ),
    "all steps are cut alike": Bug(
        "samplers.truncation:cut",
        "shard << 32 | step",
        "0",
        "survivors of a cut are uniform",
        "poisson cut",
    ),
    "Poisson 1 % too often": Bug(
        "samplers.poisson:Poisson.participations",
        "rate = exponential_rate(kept)",
        "rate = 1.01 * exponential_rate(kept)",
        "how often an example takes part is binomial",
        "poisson",
    ),
    "Poisson 1 % too rarely": Bug(
        "samplers.poisson:Poisson.participations",
        "rate = exponential_rate(kept)",
        "rate = 0.99 * exponential_rate(kept)",
        "how often an example takes part is binomial",
        "poisson",
    ),
    "Poisson 1 % too often in the last chunk": Bug(
        "samplers.poisson:Poisson.participations",
        "rate = exponential_rate(kept)",
        "rate = (1.01 if chunk == self.num_chunks - 1 else 1.0) * exponential_rate(kept)",
        "every chunk takes its share of every step",
        "poisson",
    ),
    "Poisson takes more in an epoch's first step": Bug(
        "samplers.poisson:Poisson.participations",
        "steps = trials // len(rows)",
        "steps = trials // len(rows)\n    trials = trials[(steps > 0) | (trials % 10 > 0)]\n    steps = trials // len(rows)",
        "all steps take their share of the examples",
        "poisson",
    ),
    "the last chunk is drawn with the epoch before": Bug(
        "samplers.base:BatchSampler.shard_plan",
        "self.participations(seed, epoch, chunk)",
        "self.participations(seed, max(0, epoch - (chunk == self.num_chunks - 1)), chunk)",
        "the batches are the rows that were claimed",
        "poisson",
    ),
    "the last chunk of bins is drawn with the epoch before": Bug(
        "samplers.base:BatchSampler.shard_plan",
        "self.participations(seed, epoch, chunk)",
        "self.participations(seed, max(0, epoch - (chunk == self.num_chunks - 1)), chunk)",
        "the batches are the rows that were claimed",
        "bins",
    ),
    "Poisson epochs 0, 2, 4, ... share draws": Bug(
        "samplers.poisson:Poisson.participations",
        "Key(seed, Stream.PARTICIPATION, epoch, chunk)",
        "Key(seed, Stream.PARTICIPATION, epoch * (epoch % 2), chunk)",
        "nobody comes back to a step more often than claimed",
        "poisson",
    ),
    "Poisson epochs e and e + 3 share draws": Bug(
        "samplers.poisson:Poisson.participations",
        "Key(seed, Stream.PARTICIPATION, epoch, chunk)",
        "Key(seed, Stream.PARTICIPATION, epoch % 3, chunk)",
        "nobody comes back to a step more often than claimed",
        "poisson",
    ),
    "bins of epochs e and e + 4 share draws": Bug(
        "samplers.balls_and_bins:BallsAndBins.participations",
        "key = Key(seed, Stream.PARTICIPATION, self.drawn_epoch(epoch), chunk)",
        "key = Key(seed, Stream.PARTICIPATION, epoch % 4, chunk)",
        "epochs are independent, as claimed",
        "bins",
    ),
    "bins of epochs e and e + 7 share draws": Bug(
        "samplers.balls_and_bins:BallsAndBins.participations",
        "key = Key(seed, Stream.PARTICIPATION, self.drawn_epoch(epoch), chunk)",
        "key = Key(seed, Stream.PARTICIPATION, epoch % 7, chunk)",
        "epochs are independent, as claimed",
        "bins",
    ),
    "one example is always in bin 0": Bug(
        "samplers.balls_and_bins:BallsAndBins.participations",
        "bins = uniform_integers(key, self.group_steps, len(rows))",
        "bins = uniform_integers(key, self.group_steps, len(rows))\n    bins = np.where(np.arange(rows.start, rows.stop) == 41_234, 0, bins).astype(np.int32)",
        "nobody comes back to a step more often than claimed",
        "bins",
    ),
    "the last example is always in bin 0": Bug(
        "samplers.balls_and_bins:BallsAndBins.participations",
        "bins = uniform_integers(key, self.group_steps, len(rows))",
        "bins = uniform_integers(key, self.group_steps, len(rows))\n    bins = np.where(np.arange(rows.start, rows.stop) == self.num_examples - 1, 0, bins).astype(np.int32)",
        "nobody comes back to a step more often than claimed",
        "bins",
    ),
    "bins mod T from 10 bits": Bug(
        "samplers.balls_and_bins:BallsAndBins.participations",
        "bins = uniform_integers(key, self.group_steps, len(rows))",
        "bins = ((key.words32(len(rows)) & 0x3FF) % self.group_steps).astype(np.int32)",
        "all steps take their share of the examples",
        "bins",
    ),
    "bins mod T from 16 bits": Bug(  # seen from T = 550; of 86 bins, 4 are 0.13 % too likely
        "samplers.balls_and_bins:BallsAndBins.participations",
        "bins = uniform_integers(key, self.group_steps, len(rows))",
        "bins = ((key.words32(len(rows)) & 0xFFFF) % self.group_steps).astype(np.int32)",
        "all steps take their share of the examples",
        "many bins",
    ),
    "the last bin is never drawn": Bug(
        "samplers.balls_and_bins:BallsAndBins.participations",
        "bins = uniform_integers(key, self.group_steps, len(rows))",
        "bins = uniform_integers(key, self.group_steps - 1, len(rows))",
        "all steps take their share of the examples",
        "bins",
    ),
    "the next epoch's bins are those of the last one, in reverse": Bug(
        "samplers.balls_and_bins:BallsAndBins.participations",
        "bins = uniform_integers(key, self.group_steps, len(rows))",
        "key = Key(seed, Stream.PARTICIPATION, epoch // 2 * 2, chunk)\n    bins = uniform_integers(key, self.group_steps, len(rows))\n    bins = (self.group_steps - 1 - bins if epoch % 2 else bins).astype(np.int32)",
        "epochs are independent, as claimed",
        "bins",
    ),
    "the next epoch's bins are those of the last one, moved by one": Bug(
        "samplers.balls_and_bins:BallsAndBins.participations",
        "bins = uniform_integers(key, self.group_steps, len(rows))",
        "key = Key(seed, Stream.PARTICIPATION, 0, chunk)\n    bins = uniform_integers(key, self.group_steps, len(rows))\n    bins = ((bins + epoch) % self.group_steps).astype(np.int32)",
        "epochs are independent, as claimed",
        "bins",
    ),
    "neighbours are never in one bin": Bug(
        "samplers.balls_and_bins:BallsAndBins.participations",
        "bins = uniform_integers(key, self.group_steps, len(rows))",
        "bins = uniform_integers(key, self.group_steps, len(rows))\n    bins = np.where(np.arange(bins.size) % 2 * (bins == np.roll(bins, 1)), (bins + 1) % self.group_steps, bins).astype(np.int32)",
        "examples are independent of one another",
        "bins",
    ),
    "every tenth example follows its neighbour": Bug(
        "samplers.balls_and_bins:BallsAndBins.participations",
        "bins = uniform_integers(key, self.group_steps, len(rows))",
        "bins = uniform_integers(key, self.group_steps, len(rows))\n    bins = np.where(np.arange(bins.size) % 10 == 9, np.roll(bins, 1), bins).astype(np.int32)",
        "examples are independent of one another",
        "bins",
    ),
    "chunks share draws": Bug(
        "samplers.randomness:Key.__init__",
        'index.to_bytes(8, "big")',
        '(0 * index).to_bytes(8, "big")',
        "survivors of a cut are uniform",
        "bins",
    ),
    "Poisson chunks share draws": Bug(
        "samplers.poisson:Poisson.participations",
        "Key(seed, Stream.PARTICIPATION, epoch, chunk)",
        "Key(seed, Stream.PARTICIPATION, epoch, 0)",
        "examples are independent of one another",
        "poisson",
    ),
    "32 bits of the seed count": Bug(
        "samplers.randomness:Key.__init__",
        "seed, epoch, index = check_seed(seed)",
        "seed, epoch, index = check_seed(seed) % 2**32",
        "every step and every seed cuts by itself",
        "bins",
    ),
    "the seed does not count": Bug(
        "samplers.randomness:Key.__init__",
        "seed, epoch, index = check_seed(seed)",
        "seed, epoch, index = 0 * check_seed(seed)",
        "every step and every seed cuts by itself",
        "poisson",
    ),
    "trials next to each other never both succeed": Bug(
        "samplers.randomness:bernoulli_successes",
        ".astype(np.int64) + 1",
        ".astype(np.int64) + 2",
        "how often an example takes part is binomial",
        "poisson",
    ),
    "the first trial of an epoch always succeeds": Bug(
        "samplers.randomness:bernoulli_successes",
        "positions = np.cumsum(gaps) - 1",
        "positions = np.cumsum(gaps) - gaps[0]",
        "nobody comes back to a step more often than claimed",
        "poisson",
    ),
    "uniforms of 8 bits": Bug(
        "samplers.randomness:bernoulli_successes",
        "uniforms = ((key.words64(size) >> np.uint64(11)) + np.uint64(1)) * 2.0**-53",
        "uniforms = ((key.words64(size) >> np.uint64(56)) + np.uint64(1)) * 2.0**-8",
        "how often an example takes part is binomial",
        "poisson",
    ),
    "read-ahead draws an epoch twice": Bug(
        "samplers.batches:BatchSource._plan_of",
        "self._background.submit(self._draw, following)",
        "self._background.submit(self._draw, drawn)",
        "the batches are the rows that were claimed",
        "poisson",
    ),
    "read-ahead draws every third epoch twice": Bug(
        "samplers.batches:BatchSource._plan_of",
        "self._background.submit(self._draw, following)",
        "self._background.submit(self._draw, following - (following % 3 == 2))",
        "the batches are the rows that were claimed",
        "bins",
    ),
    "read-ahead draws from another seed": Bug(
        "samplers.batches:BatchSource._plan_of",
        "self._background.submit(self._draw, following)",
        "self._background.submit(lambda e: [sampler.plan(0, e)], following)",
        "the batches are the rows that were claimed",
        "bins",
    ),
    "a source that begins later begins with the first epoch": Bug(
        "samplers.batches:BatchSource._plan_of",
        "self._plan = drawn, self._draw(drawn)",
        "self._plan = drawn, self._draw(0)",
        "every chunk takes its share of every step",
        "poisson",
    ),
    "the first steps' batches are read again at an epoch's end": Bug(
        "samplers.batches:BatchSource.cut",
        "plan.members(step % length)",
        "plan.members(step % length % (length - 2))",
        "the batches are the rows that were claimed",
        "bins",
    ),
    "padding counts": Bug(
        "samplers.batches:BatchSource.fill",
        "weights[row, columns] = 1.0",
        "weights[row] = 1.0",
        "the batches are the rows that were claimed",
        "poisson",
    ),
    "padding counts in a block's last row": Bug(
        "samplers.batches:BatchSource.fill",
        "weights[row, columns] = 1.0",
        "weights[row, k * cap : k * cap + examples.size + (row == 63)] = 1.0",
        "the batches are the rows that were claimed",
        "poisson",
    ),
    "the last of a block's members is read twice": Bug(
        "samplers.batches:BatchSource.fill",
        "weights[row, columns] = 1.0",
        "weights[row, columns] = 1.0\n            indices[row, :2] = indices[row, 0] if row == 63 else indices[row, :2]",
        "the batches are the rows that were claimed",
        "poisson",
    ),
    "passes of a batch overlap": Bug(
        "samplers.truncation:VariableBatchSampler.passes",
        "members[start : start + cap] for start in range(0, members.size, cap)",
        "members[start : start + cap] for start in range(0, members.size, cap - 1)",
        "the batches are the rows that were claimed",
        "poisson in passes",
    ),
    "the last pass of a batch is left out": Bug(
        "samplers.truncation:VariableBatchSampler.passes",
        "for start in range(0, members.size, cap)",
        "for start in range(0, members.size - cap, cap)",
        "the batches are the rows that were claimed",
        "poisson in passes",
    ),
    "the second pass takes the first rows again": Bug(
        "samplers.truncation:VariableBatchSampler.passes",
        "members[start : start + cap] for start",
        "members[start % (2 * cap) // (2 * cap) : cap] for start",
        "the batches are the rows that were claimed",
        "poisson in passes",
    ),
    "shuffle: one order for two epochs": Bug(
        "samplers.shuffle:Shuffle.drawn_epoch",
        "return epoch if",
        "return epoch // 2 * 2 if",
        "epochs are independent, as claimed",
        "shuffle",
    ),
    "shuffle: the first bucket keeps the file's order": Bug(
        "samplers.shuffle:Shuffle.ordered",
        "return members[",
        "return members if bucket == 0 else members[",
        "every chunk takes its share of every step",
        "shuffle",
    ),
    "shuffle: the first example comes first": Bug(
        "samplers.shuffle:Shuffle.shard_plan",
        "shards = Shards(",
        "order = np.concatenate([[0], order[order != 0]]).astype(np.int32)\n    shards = Shards(",
        "nobody comes back to a step more often than claimed",
        "shuffle",
    ),
    "shuffle: buckets in the same order in all epochs": Bug(
        "samplers.shuffle:Shuffle.bucket",
        "self.drawn_epoch(epoch)",
        "0",
        "epochs are independent, as claimed",
        "shuffle",
    ),
    "user Poisson draws a user's examples together": Bug(
        "samplers.poisson:Poisson.participations",
        "steps = trials // len(rows)",
        "trials = np.unique(np.concatenate([trials[::3] // 3 * 3 + k for k in range(3)]))\n    trials = trials[trials < len(rows) * self.steps_per_epoch]\n    steps = trials // len(rows)",
        "examples are independent of one another",
        "users",
    ),
    "units are drawn with replacement": Bug(
        "samplers.episodes:_first_distinct",
        "fresh[:, 1:] = value[:, 1:] != value[:, :-1]",
        "fresh[:, 1:] = True",
        "the batches are the rows that were claimed",
        "multistage",
    ),
    "each unit is drawn in two steps": Bug(
        "samplers.episodes:_ordered_draws",
        "Key(seed, Stream.PARTICIPATION, step, index)",
        "Key(seed, Stream.PARTICIPATION, step // 2, index)",
        "epochs are independent, as claimed",
        "multistage",
    ),
    "the first child of a unit is drawn always": Bug(
        "samplers.episodes:_ordered_draws",
        "    return drawn",
        "    if level: drawn[:, 0] = 0\n    return drawn",
        "the batches are the rows that were claimed",
        "multistage",
    ),
    "drawn units give the same children": Bug(
        "samplers.episodes:_ordered_draws",
        "    return drawn",
        "    if level: drawn[:] = drawn[0] % sizes.min()\n    return drawn",
        "the batches are the rows that were claimed",
        "multistage",
    ),
    "examples of units 2 % too often": Bug(
        "samplers.units_then_poisson:UnitsThenPoisson.members",
        "rate = exponential_rate(kept)",
        "rate = 1.02 * exponential_rate(kept)",
        "all steps take their share of the examples",
        "units then poisson",
    ),
    "sums over all rows leave out the last pass": Bug(
        "samplers.full_batch:FullBatch.passes",
        "for start in range(0, members.size, size)",
        "for start in range(0, members.size - size, size)",
        "the batches are the rows that were claimed",
        "full batch",
    ),
    "sums over all rows take the first row again": Bug(
        "samplers.full_batch:FullBatch.plan",
        "np.arange(n, dtype=np.int32)",
        "np.maximum(np.arange(n, dtype=np.int32) - 1, 0)",
        "the batches are the rows that were claimed",
        "full batch",
    ),
    "sums over all rows are of the first 65,536": Bug(
        "samplers.full_batch:FullBatch.plan",
        "n = self.num_examples",
        "n = min(65_536, self.num_examples)",
        "everybody takes part once an epoch",
        "full batch",
    ),
    "fixed bins are drawn anew": Bug(
        "samplers.balls_and_bins:BallsAndBins.drawn_epoch",
        'return epoch if self.assignment == "redrawn" else 0',
        "return epoch",
        "epochs are alike, as claimed",
        "fixed bins",
    ),
}


@pytest.mark.parametrize("bug", (STEPS | DRAWS).values(), ids=STEPS | DRAWS)
def test_a_bug_can_still_be_planted(bug, monkeypatch):
    plant(bug, monkeypatch)


# The step: batches of 397 places in microbatches of 100, full blocks, leaves of two types.

N = 20_000
SAMPLERS = {
    "": Poisson(N, 256, 15),
    "leaves": Poisson(N, 256),
    "passes": Poisson(N, 256, overflow="accumulate", max_batch_size=150),
    "sums": Poisson(N, 256),
}


def params_of(kind):
    rng = np.random.default_rng(0)
    large = kind == "leaves"

    def normal(*shape, dtype=np.float32):
        return (0.1 * rng.normal(size=shape)).astype(dtype)

    few = {f"a{k:02}": normal(16) for k in range(20 if large else 2)}
    few |= {
        f"b{k:02}": normal(5, 7, dtype=jnp.bfloat16 if k % 2 else np.float32)
        for k in range(12 if large else 2)
    }
    few |= {"c": normal(16, 300), "d": normal(300), "e": normal(300), "t": normal()}
    few["table"] = normal(2**18 + 1 if large else 1000, 4)
    return few | {"z": normal(300, dtype=jnp.bfloat16)}


def loss_fn(params, example):
    x, few = example["x"], params["table"][example["ids"] % len(params["table"])]
    hidden = jnp.tanh(x @ params["c"] + params["d"] + jnp.tile(few.sum(axis=0), 75))
    out = jnp.dot(hidden, params["e"] + params["z"].astype(jnp.float32)) + params["t"]
    for name, leaf in params.items():
        if name.startswith("a"):
            out += jnp.dot(leaf, x) * (int(name[1:]) + 1) / 10
        elif name.startswith("b"):
            out += jnp.sum(leaf.astype(jnp.float32) * x[:5, None] * x[None, :7])
    return optax.sigmoid_binary_cross_entropy(out, example["y"]) + 0.5 * out


def rows():
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(64, 16)).astype(np.float32),
        "ids": rng.integers(0, 2**18, (64, 3)).astype(np.int32),
        "y": rng.integers(0, 2, 64).astype(np.float32),
    }


@pytest.fixture(scope="module")
def one_audit_of_each_sampler():
    """The bugs of steps leave the draws as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coupled, "sampler_checks", functools.cache(sampler_checks))
        yield


SUMS = Platt(
    logit=lambda params, example: jnp.dot(params, example["x"]),
    label=lambda example: example["y"],
    rescaled=lambda params, a, c: a * params,
)


def audited(kind):
    root = RootKey.from_insecure_seed(5)
    if kind == "sums":
        mechanism = Mechanism(SAMPLERS[kind], 0.8, 0.5, full_sums=FullSums(4, 30.0, 2.2361))
        return coupled.audit_queries(
            SUMS, mechanism, np.full(16, 0.3, np.float32), rows(), root=root
        )
    algorithm = dpsgd(loss_fn, optax.adam(1e-3), microbatch_size=100)
    mechanism = Mechanism(SAMPLERS[kind], 0.8, 0.5)
    return coupled.audit_program(algorithm, mechanism, params_of(kind), rows(), root=root)


def failed(checks):
    of_sums = "sums over all rows: "
    return {check.name.removeprefix(of_sums) for check in checks if not check.passed}


@pytest.mark.long
@pytest.mark.usefixtures("one_audit_of_each_sampler")
@pytest.mark.parametrize("bug", STEPS.values(), ids=STEPS)
def test_a_bug_of_the_step_is_caught_by_the_audit_of_a_run(bug):
    with planted(bug):
        assert bug.check in failed(audited(bug.kind).checks)


@pytest.mark.long
@pytest.mark.parametrize("kind", SAMPLERS)
def test_without_a_bug_the_audit_of_a_run_passes(kind):
    assert not failed(audited(kind).checks)


# The draws: 88,000 examples, two chunks of which the last is smaller, in batches of 1,024.

SIZE = {"num_examples": 88_000, "batch_size": 1_024, "epochs": 8}
TREE = UnitTree.from_columns({"shop": np.arange(88_000) // 8 % 37, "user": np.arange(88_000) // 8})
DRAWN = {
    "poisson": Poisson(**SIZE),
    "bins": BallsAndBins(**SIZE),
    "many bins": BallsAndBins(**SIZE | {"batch_size": 128}),
    "fixed bins": BallsAndBins(**SIZE, assignment="fixed"),
    "shuffle": Shuffle(**SIZE),
    "poisson cut": Poisson(**SIZE, max_batch_size=1_040),
    "bins cut": BallsAndBins(**SIZE, max_batch_size=1_040),
    "poisson in passes": Poisson(**SIZE, overflow="accumulate", max_batch_size=300),
    "full batch": FullBatch(88_000, 4),
    "users": UserPoisson(**SIZE, max_contributions=3),
    "multistage": Multistage(TREE, (16, 8, 4), steps=600),
    "units then poisson": UnitsThenPoisson(TREE, (16, 40), 0.5, steps=600),
}


def draws_audited(kind):
    return sampler_checks(DRAWN[kind], DRAWN[kind], seed=2**128 + 7)


@pytest.mark.long
@pytest.mark.parametrize("bug", DRAWS.values(), ids=DRAWS)
def test_a_bug_of_the_draws_is_caught_at_88_000_examples(bug):
    with planted(bug):
        assert bug.check in failed(draws_audited(bug.kind))


@pytest.mark.long
@pytest.mark.parametrize("kind", DRAWN)
def test_without_a_bug_draws_of_88_000_examples_pass(kind):
    assert not failed(draws_audited(kind))
