"""What devices send each other is read in compiled programs, by every way in which they say it."""

import pytest

from tests.dpsgd.engine.collectives import Collective, collectives

BLOCK = """
%microbatch (x: f32[2]) -> f32[2] {
  ROOT %inner = bf16[6]{0} all-to-all(%x), replica_groups={{0,1}}
}

%step (x: f32[2]) -> f32[2] {
  %loop = f32[2]{0} while(%x), condition=%less, body=%microbatch, metadata={op_name="%step"}
  %name.all-gather = f32[2]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %sum = (f32[16,2]{1,0}, pred[], /*index=2*/s8[3]{0}) all-reduce(%x, %y, %z), channel_id=6
}

%called (x: f32[2]) -> f32[2] {
  ROOT %sent = u64[5]{0} collective-permute(%x), source_target_pairs={{0,1}}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %scattered = f32[4]{0} reduce-scatter(%x), channel_id=1, replica_groups=GROUPS, dimensions={0}
  %other = f32[2]{0} call(%x), to_apply=%called
  ROOT %steps = (s32[], f32[2]{0}) while(%tuple), condition=%less, body=%step
}
"""


@pytest.mark.parametrize(
    "groups",
    ["[1,8]<=[8]", "{{0,1,2,3,4,5,6,7}}", "[2,8]<=[2,8]T(1,0)", "mesh['a'=8,'b'=2] {'a'}"],
)
def test_each_has_its_whole_size_and_the_loops_around_it(groups):
    assert collectives(BLOCK.replace("GROUPS", groups)) == [
        Collective("reduce-scatter", 8 * 16, 0),
        Collective("collective-permute", 40, 0),
        Collective("all-to-all", 12, 2),
        Collective("all-reduce", 4 * 32 + 1 + 3, 1),
    ]
