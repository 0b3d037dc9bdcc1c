"""`SoftmaxRouter`: the router of a mixture of experts."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.rowwise.router import topk_softmax


class SoftmaxRouter(torch.nn.Module):
    """A product and `topk_softmax`, in place of the routers of transformers' mixtures that select experts by a softmax over all of them.

    weight: float [E, H]. forward(hidden_states): float [..., H] in its dtype, T tokens. Returns the logits [T, E] in that dtype, the weights, float32
    [T, top_k], and the experts, int32 [T, top_k]. `Int8Experts` takes both as they are. renormalize: the weights of a token are divided by their sum.
    Raises BadTensorShapeError for another H, BadTensorDtypeError for another dtype than the weight's.
    """

    def __init__(self, hidden_dim: int, num_experts: int, top_k: int, *, renormalize: bool = True, device=None, dtype=torch.bfloat16):
        """Memory for the weight, uninitialized."""
        super().__init__()
        self.top_k, self.renormalize = top_k, renormalize
        self.weight = torch.nn.Parameter(torch.empty(num_experts, hidden_dim, dtype=dtype, device=device), requires_grad=False)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.weight.shape[1]
        if not isinstance(hidden_states, torch.Tensor):
            raise BadParamError(f"hidden_states: expected a tensor, got {type(hidden_states).__name__}")
        if hidden_states.shape[-1:] != (hidden,):
            raise BadTensorShapeError(f"hidden_states: expected [..., {hidden}], got {list(hidden_states.shape)}")
        if hidden_states.dtype is not self.weight.dtype and not torch.is_autocast_enabled(hidden_states.device.type):
            raise BadTensorDtypeError(f"hidden_states: expected {self.weight.dtype} as the weight, got {hidden_states.dtype}")
        logits = torch.nn.functional.linear(hidden_states.reshape(-1, hidden), self.weight)
        return logits, *topk_softmax(logits, self.top_k, renormalize=self.renormalize)

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        return f"{hidden}, num_experts={experts}, top_k={self.top_k}, renormalize={self.renormalize}"
