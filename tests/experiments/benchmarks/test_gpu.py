"""Kernels and bytes of compiled GPU programs."""

import textwrap

import pytest

from experiments.benchmarks import gpu_program

GPU_PROGRAM = """
%fused_scatter (p: f32[9,2], q: s32[3]) -> f32[9,2] {
  ROOT %scatter.1 = f32[9,2]{1,0} scatter(%p, %q, %r), to_apply=%add
}

ENTRY %main.1 (a.1: f32[9,2], b.1: s32[3]) -> (f32[9,2], s32[]) {
  %a.1 = f32[9,2]{1,0} parameter(0), metadata={op_name="a"}
  %b.1 = s32[3]{0} parameter(1)
  %pair = (f32[9,2]{1,0}, s32[]) fusion(%a.1, %b.1), kind=kLoop, calls=%fused_other
  %first = f32[9,2]{1,0} get-tuple-element(%pair), index=0
  %rows = f32[9,2]{1,0} fusion(%first, %b.1), kind=kInput, calls=%fused_scatter
  %second = s32[] get-tuple-element(%pair), index=1
  ROOT %tuple.1 = (f32[9,2]{1,0}, s32[]) tuple(%rows, %second)
}
"""


def test_gpu_kernels_are_fusions_with_read_and_written_shapes():
    pair, rows = gpu_program.kernels(GPU_PROGRAM)
    assert (pair.name, pair.written, pair.body) == ("pair", ["f32[9,2]", "s32[]"], "")
    assert (rows.written, rows.read) == (["f32[9,2]"], ["f32[9,2]", "s32[3]"])
    assert " scatter(" in rows.body


LOOP = """
%body (p: (s32[], f32[9,2])) -> (s32[], f32[9,2]) {
  %p = (s32[], f32[9,2]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[9,2]{1,0} get-tuple-element(%p), index=1
  %twice = f32[9,2]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused
  ROOT %pair = (s32[], f32[9,2]{1,0}) tuple(%i, %twice)
}

ENTRY %main (a: f32[9,2], i: s32[]) -> (s32[], f32[9,2]) {
  %a = f32[9,2]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %start = (s32[], f32[9,2]{1,0}) tuple(%i.1, %a)
  ROOT %loop = (s32[], f32[9,2]{1,0}) while(%start), condition=%c, body=%body, KNOWN
}
"""
COUNT = 'backend_config={"known_trip_count":{"n":"5"}}'


@pytest.mark.parametrize(("known", "times"), [(COUNT, 5), ("metadata={}", 1)])
def test_kernels_of_a_loop_count_once_per_known_iteration(known, times):
    moved = gpu_program.traffic(LOOP.replace("KNOWN", known), largest=18)
    assert moved == (times, times, 8.0 * times)


LOOP_THUNKS = """001: kCopy [source | sink] kCopy
002: kWhile [prev=001 (1)]
condition:
    003: kCustomKernel [source | sink] wrapped_compare
  body:
    000: kCommandBuffer [source | sink]
        004: kCustomKernel [source] fusion
        005: kWhile [prev=004 (1)]
"""
GRAPH = "000: kCommandBuffer [source | sink]\n"


@pytest.mark.parametrize(
    ("thunks", "work"),
    [
        (LOOP_THUNKS, (2, 1)),  # the kernel of the condition, and a graph
        (LOOP_THUNKS + "    006: kWhile [sink]\n        007: kCustomKernel [sink]\n", (3, 2)),
        (LOOP_THUNKS + "    006: kCopyDeviceToHost [sink]\n", (3, 2)),
        (GRAPH + textwrap.indent(LOOP_THUNKS, "    "), (0, 0)),
    ],
)
def test_host_works_only_for_loops_outside_graphs(thunks, work):
    assert gpu_program.host_work(thunks) == work


def test_kernels_of_a_step_are_those_in_the_loop():
    program = LOOP.replace("KNOWN", COUNT).replace(
        "ROOT %loop", "%x = s32[] add(%i.1)\n  ROOT %loop"
    )
    assert [(k.name, k.times) for k in gpu_program.kernels(program, in_loop=True)] == [("twice", 1)]
