"""Asks the cost model about each case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scaled_mm.bench.experts.cases import MODELS
from scaled_mm.bench.parallel.cases import DECODERS, EXPERTS, LINEAR
from scaled_mm.bench.parallel.record import STATIC, DecoderRecord, ExpertsRecord, LinearRecord, WayRecord
from scaled_mm.parallel import cost


def linear(ms: Sequence[int], ranks: Sequence[int], gpu: str, hosts: cost.Hosts) -> list[LinearRecord]:
    """Every layer, with the ranks of a layer together."""
    return [
        LinearRecord(shape=shape, M=m, N=n, K=k, ranks=size, single_us=_us(cost.predict(m, n, k, 1, gpu=gpu, hosts=hosts)), ways=ways)
        for shape, (n, k) in LINEAR.items()
        for size in ranks
        for m in ms
        for ways in [dict(_ways(m, n, k, size, gpu, hosts))]
    ]


def _ways(m: int, n: int, k: int, ranks: int, gpu: str, hosts: cost.Hosts) -> Iterator[tuple[str, WayRecord]]:
    for name in (*cost.WAYS, *STATIC):
        static, way = name in STATIC, STATIC.get(name, name)
        options = dict(gpu=gpu, hosts=hosts, way=way, static=static)
        chunks = cost.best_chunks(m, n, k, ranks, **options)
        found = cost.predict(m, n, k, ranks, chunks=chunks, **options)
        yield (
            name,
            WayRecord(
                us=_us(found),
                plain_us=_us(cost.predict(m, n, k, ranks, **options)),
                chunks=chunks,
                hidden=round(found.hidden, 2),
                sent=round(cost.sent_bytes(m, n, ranks, way=way, static=static, k=k)),
                parts=_rounded(found.parts),
            ),
        )


def decoders(layers: Sequence[LinearRecord], gpu: str) -> list[DecoderRecord]:
    """Sums over the linear layers of each model; products of layers whose N is divided are added."""
    by_case = {(one.shape, one.M, one.ranks): one for one in layers}
    facts, found = cost.facts_of(gpu), []
    for model, (columns, rows) in DECODERS.items():
        for m, ranks in dict.fromkeys((one.M, one.ranks) for one in layers):
            parts = [by_case[name, m, ranks] for name in rows]
            single, divided = (sum(cost.product_us(m, -(-n // size), k, facts) for n, k in columns) for size in (1, ranks))
            us = {way: round(divided + sum(one.ways[way].us for one in parts), 2) for way in parts[0].ways}
            found.append(DecoderRecord(model=model, M=m, ranks=ranks, single_us=round(single + sum(one.single_us for one in parts), 2), us=us))
    return found


def experts(ms: Sequence[int], ranks: Sequence[int], hosts: cost.Hosts) -> list[ExpertsRecord]:
    """The layer of experts, on the numbers of ranks that divide its experts."""
    model = MODELS[EXPERTS]
    found = []
    for size in ranks:
        for m in ms if model.experts % size == 0 else ():
            sizes = (m, model.choices, model.experts, model.hidden, size, hosts)
            sent, replicated = _rounded(cost.experts_all_to_all(*sizes)), _rounded(cost.experts_replicated(*sizes))
            found.append(ExpertsRecord(model=EXPERTS, M=m, ranks=size, all_to_all=sent, replicated=replicated))
    return found


def _us(found: cost.Prediction) -> float:
    return round(found.us, 2)


def _rounded(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(us, 2) for name, us in parts.items()}
