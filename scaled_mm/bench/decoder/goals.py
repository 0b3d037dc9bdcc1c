"""The goals of decoder layers, and whether a document meets them."""

from __future__ import annotations

from scaled_mm.bench.analysis import over
from scaled_mm.bench.decoder.peers import BF16, VLLM
from scaled_mm.bench.decoder.record import DecoderCaseRecord, DecoderDocument
from scaled_mm.bench.goals import Goal, Outcome, outcome

FEW_TOKENS = 64


def over_vllm(case: DecoderCaseRecord) -> float | None:
    return over(case, VLLM)


def over_bf16(case: DecoderCaseRecord) -> float | None:
    return over(case, BF16)


def goals() -> list[Goal[DecoderCaseRecord]]:
    return [
        Goal(f"over vLLM's operators, up to {FEW_TOKENS} tokens, each", over_vllm, 1.25, lambda case: case.M <= FEW_TOKENS),
        Goal(f"over vLLM's operators, above {FEW_TOKENS} tokens, each", over_vllm, 1.05, lambda case: case.M > FEW_TOKENS),
        Goal("over torch in bfloat16, each", over_bf16, 1.6, lambda case: True),
    ]


def outcomes(document: DecoderDocument) -> list[Outcome[DecoderCaseRecord]]:
    """Empty on a CPU: the goals are for GPUs."""
    if document.environment.arch == "cpu":
        return []
    return [outcome(goal, document.cases, lambda case: case.label) for goal in goals()]
