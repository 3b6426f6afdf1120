"""What a row sees of a tree, and where its keys count: the structs of prefill_softmax.cuh and
decode_softmax.cuh, compiled for the host, against the reference's mask."""

import random
import re
from pathlib import Path

import pytest
import torch
from cuda_sources import HostProgram, needs_gxx
from op_inputs.trees import random_parents, words_of

from torchpaged.custom_ops.attention.mask import tree_positions
from torchpaged.custom_ops.cuda import jit

pytestmark = needs_gxx

HOST = """
#include <cstdio>
typedef unsigned int u32;
typedef unsigned long long u64;
#define __device__
#define __forceinline__ inline
#define __popc __builtin_popcount
#define __popcll __builtin_popcountll
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
"""
#: Input: word, context, first key, keys. Output: a bit and a position for each.
MAIN = """
int main() {
  u64 word; int context, first, keys;
  while (scanf("%llu %d %d %d", &word, &context, &first, &keys) == 4) {
    PREPARE
    for (int key = 0; key < keys; ++key) printf("%d %d ", SEES, POSITION);
    printf("\\n");
  }
}
"""
KERNELS = {
    "prefill_softmax.cuh": (
        r"struct Seen \{.*?\n\};.*?struct Branch \{.*?\n\};",
        "",
        "const Seen seen = Branch{word, context}.from(first);",
        "(int)seen.sees(key)",
        "seen.position(key)",
        (64, 128),
    ),
    **{
        f"decode_softmax.cuh, {keys} keys": (
            r"template <bool WIDE> struct KeyBits.*?struct Branches \{.*?\n\};",
            f"constexpr int WARP_KEYS = {keys};",
            "const Branches seen(context, first);",
            "(int)(seen.seen((u32)word) >> key & 1)",
            "seen.position((u32)word, key)",
            (keys,),
        )
        for keys in (16, 32, 64)
    },
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_and_positions(tmp_path: Path, kernel: str) -> None:
    pattern, constants, prepare, sees, position, sizes = KERNELS[kernel]
    (found,) = re.findall(pattern, jit.files()[kernel.split(",")[0]].read_text(), re.DOTALL)
    main = MAIN.replace("PREPARE", prepare).replace("SEES", sees).replace("POSITION", position)
    options = ("-fsanitize=undefined", "-fno-sanitize-recover")
    program = HostProgram(tmp_path, "\n".join((HOST, constants, found, main)), options=options)
    r, most = random.Random(kernel), 64 if kernel == "prefill_softmax.cuh" else 8
    lines, wanted = [], []
    for count in (1, 2, 5, 7, 8, 33, 63, 64):
        if count > most:
            continue
        for kind in ("random", "deep", "chain"):
            context = r.choice((0, 1, 31, 32, 33, 63, 64, 100, 500))
            words = words_of(random_parents(count, r.randrange(99), kind))
            _, positions, hidden = tree_positions(torch.tensor(words), context + count)
            token = r.choice((0, count // 2, count - 1))
            shown, at = (~hidden[token]).tolist(), positions[token].tolist()
            for edge in (0, 1, 15, 16, 31, 32, 33, 62, 63, 64, 127, -1, -7, -count):
                keys = r.choice(sizes)
                first = max(0, context - edge)
                lines.append(f"{words[token] & (2**64 - 1)} {context} {first} {keys}")
                # what lies behind a row's own key is never seen
                wanted.append(
                    [
                        (key <= context + token and shown[key], at[key]) if key < len(at) else (False, None)
                        for key in range(first, first + keys)
                    ]
                )
    said = program(given="\n".join(lines)).splitlines()
    for line, want, out in zip(lines, wanted, said, strict=True):
        numbers = list(map(int, out.split()))
        for (seen, place), got, got_place in zip(want, numbers[::2], numbers[1::2], strict=True):
            assert bool(got) == seen, line
            assert not seen or got_place == place, line
