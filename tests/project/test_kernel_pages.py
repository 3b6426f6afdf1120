"""The budgets on the kernels' pages are those of the shapes that the launching code chooses, on an H200."""

import re
from pathlib import Path

import torch
from specialisations import specialisation

from torchpaged.custom_ops.attention.cuda import prefill_shape as prefill
from torchpaged.custom_ops.attention.cuda import specialise
from torchpaged.custom_ops.layers.cuda import linear_large, linear_shape

PAGES = Path(__file__).parents[2] / "docs" / "kernels"
# an H200: multiprocessors, bytes of shared memory of each and of a CTA
SMS, PER_SM, PER_CTA = (132, 228 << 10, 227 << 10)
# of an 8B Llama
LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of the table whose first header is ``first``."""
    lines = (PAGES / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    body = lines[start + 2 :]
    end = next(i for i, line in enumerate([*body, ""]) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body[:end]]


def numbers(cell: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", cell)]


def test_decode() -> None:
    found = rows("decode.md", "heads, pairs")
    assert len(found) >= 8
    for name, cut, ctas_per_sm, cluster, team, stage, shared, registers in found:
        heads, kv_heads, dim = numbers(name.split(",")[0].split()[0])
        pairs, query_len = (
            numbers(name.split(",")[1])[0],
            numbers(name.split(",")[2])[0] if name.count(",") > 1 else 1,
        )
        kv_dtype = torch.float8_e4m3fn if "fp8" in name else torch.bfloat16
        spec = specialisation(
            dim=dim, group=heads // kv_heads, num_kv_heads=kv_heads, kv_dtype=kv_dtype, scales="fp8" in name
        )
        config, shape = specialise.decode_config(
            spec, query_len, pairs, early=True, sms=SMS, shared_per_sm=PER_SM
        )
        query_rows = config["PAIR_HEADS"] * config["GROUP"] * config["QUERY_LEN"]
        assert numbers(cut) == [shape.warps, shape.keys, shape.stages], name
        assert numbers(ctas_per_sm) == [shape.ctas_per_sm], name
        assert numbers(cluster) == [shape.cluster], name
        assert numbers(team) == [config["TEAM"]], name
        assert numbers(stage) == [shape.stage_bytes(dim, dim, kv_dtype.itemsize)], name
        assert numbers(shared) == [shape.shared_bytes(dim, dim, kv_dtype.itemsize, query_rows)], name
        assert numbers(registers)[0] * shape.warps * 32 * shape.ctas_per_sm <= 65536, name


def test_linear() -> None:
    found = rows("linear.md", "layer, tokens")
    assert len(found) >= 12
    for name, kernel, tile, warps, stages, cluster, ctas, ctas_per_sm, shared, registers in found:
        layer, tokens = name.split(", ")
        shape = linear_shape.linear_shape(int(tokens), *LAYERS[layer], SMS, True, True, PER_SM, PER_CTA)
        norm = layer in ("qkv", "gate_up") and linear_shape.norm_is_fused(
            shape, torch.bfloat16, torch.bfloat16
        )
        assert kernel == ("`linear_wide`" if shape.wide else "`linear`"), name
        assert [int(x) for x in (tile, warps, stages, cluster, ctas, ctas_per_sm)] == [
            shape.rows,
            shape.threads // 32,
            shape.stages,
            shape.cluster,
            shape.grid(LAYERS[layer][0]),
            shape.ctas_per_sm,
        ], name
        assert numbers(shared) == [shape.shared_bytes(int(tokens), norm)], name
        assert int(registers) * shape.threads * shape.ctas_per_sm <= 65536, name


def test_large_products() -> None:
    found = rows("linear.md", "layer, up to 256 tokens")
    assert len(found) >= 3
    for name, tile, warps, stages, parts, ctas, shared, registers in found:
        layer, tokens = name.split(", ")
        shape = linear_large.large_shape(int(tokens), *LAYERS[layer], SMS)
        assert shape is not None, name
        assert [*map(int, (tile, warps, stages, parts, ctas)), *numbers(shared)] == [
            shape.rows,
            shape.threads // 32,
            shape.stages,
            shape.k_parts,
            shape.grid(LAYERS[layer][0]),
            shape.shared_bytes,
        ], name
        assert int(registers) * -(-shape.threads // 128) * 128 <= 65536, name


def test_prefill() -> None:
    found = rows("prefill.md", "head_dim K/V")
    assert len(found) >= 5
    for widths, groups, threads, keys, stages, buffers, shared in found:
        dim, dim_v = numbers(widths)
        shape = prefill.prefill_shape(dim, dim_v)
        cut = [int(groups), int(threads), int(keys), *numbers(stages), int(buffers)]
        assert cut == [
            shape.groups,
            shape.threads,
            shape.keys,
            shape.k_stages,
            shape.v_stages,
            shape.q_stages,
        ], widths
        config = prefill.prefill_config(specialisation(dim=dim, dim_v=dim_v))
        assert numbers(shared) == [prefill.shared_bytes(config)], widths


def test_prefill_over_fp8() -> None:
    found, e4m3 = rows("prefill.md", "head_dim with fp8"), torch.float8_e4m3fn
    assert len(found) >= 5
    for widths, threads, keys, raw, buffers, shared in found:
        dim, dim_v = numbers(widths)
        shape = prefill.prefill_shape_fp8(dim, dim_v)
        cut = [shape.threads, shape.keys, shape.raw_stages, shape.q_stages]
        assert [int(threads), int(keys), int(raw), int(buffers)] == cut, widths
        assert (shape.groups, shape.k_stages, shape.v_stages) == (2, 2, 2), widths
        config = prefill.prefill_config(specialisation(dim=dim, dim_v=dim_v, kv_dtype=e4m3))
        assert numbers(shared) == [prefill.shared_bytes(config)], widths


def test_numbers_of_the_drawings() -> None:
    """What the drawing of each page starts from."""
    shape = specialise.decode_shape(128, 128, 2, 4, 64 * 8, SMS, PER_SM)
    team = specialise.team(8, shape.ctas_per_sm * SMS)
    total, teams = 64 * (4096 // (shape.warps * shape.keys)), shape.ctas_per_sm * SMS // team
    text = (PAGES / "decode.md").read_text()
    assert (total, teams, {total * (t + 1) // teams - total * t // teams for t in range(teams)}) == (
        4096,
        33,
        {124, 125},
    )
    drawn = (PAGES.parent / "pictures" / "decode.svg").read_text()
    assert "4096 tiles, 64 keys each" in drawn
    assert "33 runs of 124 or 125 tiles" in drawn
    assert "264 CTAs, two per multiprocessor" in text
    tiles = 16384 // (prefill.prefill_shape(128, 128).rows // 4)
    assert tiles == 512
    assert (
        "512 tiles of 32 tokens × 4 heads for each of 8 kv heads are 4096"
        in (PAGES / "prefill.md").read_text()
    )
