"""Fits the model's constants to the H200's measured rows, and says what held-out layers lose: `python tests/autotune/fit_model.py`.

A random search that keeps what lowers the objective: the loss of the first choice, the rank of the fastest row, and a little of
the error of the times themselves. Not run by pytest: it takes minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import sys
from pathlib import Path

from scaled_mm.autotune import model
from scaled_mm.autotune.candidates import candidates
from scaled_mm.autotune.model import Constants, Product, predict
from scaled_mm.tables import load_table

DATA = Path(__file__).parents[1] / "tables" / "data" / "h200_rows.json"
NOT_FITTED = ("split_us", "prefetch_us", "padding", "pressure", "refill_us", *(name for name in vars(model.FITTED) if name.startswith("decode_")))
START = Constants(4.0, 1.0, 0.85, 0.9, 2.0, 1.6, 1.0, 1.0, 0.5, 0.5, 0.1, 0.05, 0.5)
Times = dict[Product, dict[str, float]]

ROWS = {row.name: row for row in candidates(load_table("sm90"))}
H200 = model.facts("NVIDIA H200", "sm90", 132)


def objective(constants: Constants, times: Times) -> float:
    loss = error = cells = behind = third = 0.0
    for product, us in times.items():
        predicted = {name: predict(ROWS[name], product, H200, constants) for name in us}
        ranked = sorted(us, key=lambda name: (predicted[name], name))
        fastest = min(us, key=us.__getitem__)
        loss += us[ranked[0]] / us[fastest] - 1
        third += fastest in ranked[:3]
        behind += sum(max(0.0, math.log(predicted[fastest] / predicted[name]) + 0.003) for name in us if name != fastest) / len(us)
        error += sum(math.log(predicted[name] / us[name]) ** 2 for name in us)
        cells += len(us)
    return (loss + 0.3 * behind - 0.02 * third) / len(times) + 0.05 * math.sqrt(error / cells)


def fit(times: Times, steps: int, seed: int) -> Constants:
    dice = random.Random(seed)
    fields = [field.name for field in dataclasses.fields(Constants) if field.name not in NOT_FITTED]
    best, least, width = START, objective(START, times), 0.4
    for _ in range(steps):
        changed = {name: getattr(best, name) * math.exp(dice.gauss(0, width)) for name in dice.sample(fields, dice.choice([1, 1, 2, 3]))}
        trial = dataclasses.replace(best, **changed)
        if (value := objective(trial, times)) < least:
            best, least = trial, value
        width = max(0.05, width * 0.999)
    return best


def main(steps: int) -> None:
    model.config_cost = functools.lru_cache(maxsize=None)(model.config_cost)  # the same rows over and over
    times: Times = {(case["M"], case["N"], case["K"]): case["us"] for case in json.loads(DATA.read_text())["cases"]}
    layers = sorted({product[1:] for product in times})
    for fold in range(3):
        held = {product: us for product, us in times.items() if product[1:] in layers[fold::3]}
        constants = fit({product: us for product, us in times.items() if product not in held}, steps, fold)
        print("held out", layers[fold::3], accuracy(held, constants), flush=True)
    constants = min((fit(times, steps, seed) for seed in range(4)), key=lambda one: objective(one, times))
    print(constants, accuracy(times, constants))


def accuracy(times: Times, constants: Constants) -> model.Accuracy:
    return model.accuracy(times, ROWS, H200, constants)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2500)
