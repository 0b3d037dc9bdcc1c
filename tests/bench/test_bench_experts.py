"""`scaled-mm bench experts` end to end on a CPU; its routings; the rows of tiles that the Triton kernel is given; goals."""

from __future__ import annotations

import argparse
import shlex

import pytest
import torch

import scaled_mm as sm
from scaled_mm.bench.experts import goals, report
from scaled_mm.bench.experts.cases import BALANCED, CHANNEL, LAYER, MODELS, SKEWED, W2, W13, ExpertsCase, cases
from scaled_mm.bench.experts.inputs import ROUTINGS, ExpertsInputs, ExpertsWeights
from scaled_mm.bench.experts.record import ExpertsDocument
from scaled_mm.bench.triton.tiles import align, align_one, configs
from scaled_mm.cli import bench
from scaled_mm.cli.bench import frame

PARSER = argparse.ArgumentParser()
bench.add_arguments(PARSER)
SMALL = ["experts", "--device", "cpu", "--budget-ms", "0.5", "--seed", "1"]


def parse(*words: str) -> argparse.Namespace:
    return PARSER.parse_args(list(words))


def inputs(model: str, tokens: int, part: str, routing: str = BALANCED) -> ExpertsInputs:
    generator = torch.Generator().manual_seed(0)
    (case,) = cases([model], [tokens], [part], [routing], [CHANNEL])
    return ExpertsInputs(case, ExpertsWeights(MODELS[model], False, torch.device("cpu"), generator), generator)


def test_the_recorded_command_gives_the_same_arguments():
    args = parse(*SMALL, "--tokens", "3", "--parts", "w13,layer", "--routing", "skewed", "--scales", "block", "--peers", "none", "--no-check")
    line = frame.command_line(args, args.parser)
    assert line.startswith("scaled-mm bench experts ") and parse(*shlex.split(line)[2:]) == args


def test_experts_on_a_cpu_write_a_report_with_equal_bits(tmp_path, capsys):
    assert bench.run(parse(*SMALL, "--tokens", "1,5", "--out", str(tmp_path))) == frame.OK
    assert "microseconds per call" in capsys.readouterr().out
    made = ExpertsDocument.load(tmp_path)
    assert {(case.part, case.scales, case.routing) for case in made.cases} == {
        (part, scales, routing) for part in (W13, W2, LAYER) for scales in (CHANNEL, "block") for routing in (BALANCED, SKEWED)
    }
    assert all(result.failed is None for case in made.cases for result in case.results.values())
    assert all(case.results["ours"].bit_equal is True and case.check.startswith("checked") for case in made.cases)
    assert all(case.results["loop"].bit_equal is True for case in made.cases if case.part != LAYER)
    text = (tmp_path / "experts.md").read_text()
    assert f"`{made.command}`" in text and "### tiny, w13, scales of blocks, skewed routing" in text and "24 of 24 checked" in text
    assert bench.run(parse("experts", "--render", str(tmp_path))) == frame.OK and (tmp_path / "experts.md").read_text() == text


@pytest.mark.parametrize(
    "words, message",
    [
        (["--models", "llama"], "--models: expected all, or some of mixtral, qwen3, deepseek, deepseek_ep8, tiny, got 'llama'"),
        (["--tokens", "0"], "--tokens: M must be a positive integer"),
        (["--parts", "w1"], "--parts: expected all, or some of w13, w2, layer, got 'w1'"),
        (["--routing", ""], "--routing: expected all, or some of balanced, skewed, got an empty list"),
        (["--peers", "triton"], "unknown peer 'triton' on cpu: expected all, none, or some of loop"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(words, message, capsys):
    assert bench.run(parse(*SMALL, *words)) == frame.USAGE
    assert message in capsys.readouterr().err


def test_a_token_has_different_experts_and_a_skewed_routing_prefers_some():
    found = {}
    for routing in (BALANCED, SKEWED):
        made = inputs("tiny", 400, LAYER, routing)
        assert len(made.routings) == ROUTINGS
        for one in made.routings:
            assert all(len(set(ids)) == 2 for ids in one.topk_ids.tolist())
            torch.testing.assert_close(one.topk_weights.sum(-1), torch.ones(400))
        counts = torch.stack([torch.bincount(one.topk_ids.flatten(), minlength=8) for one in made.routings])
        assert (counts.sum(1) == 800).all()
        found[routing] = (counts.max(1).values / 100).float()
        favourites = counts.argmax(1)
        assert routing == BALANCED or len(set(favourites.tolist())) == 4  # renamed by two from one routing to the next
    assert (found[BALANCED] < 1.4).all() and (found[SKEWED] > 1.8).all()


def test_experts_elsewhere_have_no_rows():
    model = MODELS["deepseek_ep8"]
    ids = torch.arange(16).view(2, 8) * 17
    expert_map = torch.full((model.experts,), -1, dtype=torch.int32)
    expert_map[: model.here] = torch.arange(model.here, dtype=torch.int32)
    order = sm.moe_sort(ids, model.here, expert_map=expert_map)
    assert order.ends[-1] == (ids < model.here).sum() and ExpertsCase("deepseek_ep8", 2, 1, 1).copies == 16


@pytest.mark.parametrize("sorted_rows", [False, True])
@pytest.mark.parametrize("tokens, choices, experts, bm", [(1, 1, 1, 16), (5, 2, 8, 16), (100, 8, 16, 32), (3, 2, 200, 64), (70, 1, 3, 64)])
def test_tiles_hold_each_row_once_and_rows_of_one_expert(tokens, choices, experts, bm, sorted_rows):
    ids = torch.randint(-1, experts, (tokens, choices), generator=torch.Generator().manual_seed(tokens))
    order = sm.moe_sort(ids, experts)
    tiles = align(order.order, order.ends, bm, sorted_rows)
    copies, rows = tokens * choices, tiles.rows.view(-1, bm)
    held = tiles.rows[tiles.rows < copies]
    names = torch.arange(int(order.ends[-1])) if sorted_rows else order.order[order.order >= 0]
    assert torch.equal(held.sort().values, names.to(torch.int32).sort().values)
    assert (rows[int(tiles.tiles) :] == copies).all() and len(rows) == len(tiles.experts)
    for tile, expert in zip(rows[: int(tiles.tiles)], tiles.experts):
        inside = tile[tile < copies].long()
        assert len(inside)
        of_copies = order.order[inside].long() if sorted_rows else inside
        assert (ids.flatten()[of_copies] == expert).all()


@pytest.mark.parametrize("rows, bm", [(1, 16), (16, 16), (17, 16), (100, 64)])
def test_a_plain_product_has_its_rows_in_order(rows, bm):
    tiles = align_one(rows, bm, torch.device("cpu"))
    count = int(tiles.tiles)
    assert count == -(-rows // bm) == len(tiles.experts) and not tiles.experts.any()
    assert tiles.rows.tolist() == [*range(rows), *[rows] * (count * bm - rows)]


def test_every_number_of_rows_has_configurations():
    for rows in (0.5, 24, 25, 64, 65, 4096):
        for block in (False, True):
            found = configs(rows, block)
            assert len(set(found)) == len(found) > 3 and all(config.bk == 128 or not block for config in found)


def test_goals_compare_with_triton_and_the_chain(tmp_path):
    bench.run(parse(*SMALL, "--tokens", "5", "--routing", "balanced", "--out", str(tmp_path)))
    made = ExpertsDocument.load(tmp_path)
    assert goals.outcomes(made) == []  # on a CPU
    made.environment.arch, made.environment.gpu = "sm90", "NVIDIA H200"
    for case, factor in zip(made.cases, (1.5, 1.2, 2.0, 1.5, 0.9, 2.0)):
        ours = case.results["ours"]
        rival = "chain" if case.part == LAYER else "triton"
        case.results[rival] = ours.model_copy(update={"us": ours.us * factor})
    found = {one.goal.what: one for one in goals.outcomes(made)}
    parts = [(case.part, case.scales) for case in made.cases]
    assert parts == [(part, scales) for scales in (CHANNEL, "block") for part in (W13, W2, LAYER)]
    over_triton = found["grouped products, scales of channels, over Triton, mean"]
    assert over_triton.met is True and over_triton.reached == pytest.approx((1.5 * 1.2) ** 0.5) and over_triton.count == 2
    each = found["grouped products, scales of blocks, over Triton, each"]
    assert each.met is False and each.worst == pytest.approx(0.9) and "w2" in each.at
    assert found["layers, scales of blocks, up to 512 tokens, over the chain, mean"].reached == pytest.approx(2.0)
    assert found["grouped products, scales of channels, of the roof, mean"].met is None
    assert any("over Triton" in str(part) for part in report.contents(made))


def test_a_goal_is_on_the_share_of_a_layer_that_its_products_take(tmp_path):
    bench.run(parse(*SMALL, "--tokens", "5", "--routing", "balanced", "--parts", "layer", "--out", str(tmp_path)))
    made = ExpertsDocument.load(tmp_path)
    made.environment.arch, made.environment.gpu = "sm90", "NVIDIA H200"
    of_channels = made.cases[0]
    ours = of_channels.results["ours"]
    of_channels.results["steps"] = ours.model_copy(update={"us": ours.us * 0.2})
    of_64 = of_channels.model_copy(update={"M": 64})
    for some, reached in (([of_channels], None), ([of_channels, of_64], 0.8)):
        found = {one.goal.what: one for one in goals.outcomes(made.model_copy(update={"cases": some}))}
        share = found["layers, scales of channels, from 64 tokens on, share of products and activation"]
        assert share.reached == (None if reached is None else pytest.approx(reached)) and share.met is (None if reached is None else False)
