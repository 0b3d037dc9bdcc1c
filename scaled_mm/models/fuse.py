"""`fuse_`: norm + quantize, activation + quantize and the router of a mixture as one operator each, in a quantized model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch

from scaled_mm.errors import BadParamError, lacks_memory
from scaled_mm.models.blocks import blocks_of, check_in_memory, is_patched, name_of_activation, replace
from scaled_mm.models.calibration import tensors_of, without_cache
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear
from scaled_mm.nn.mlp import GatedMLP
from scaled_mm.nn.norm import RMSNorm
from scaled_mm.nn.router import SoftmaxRouter
from scaled_mm.rowwise.arithmetic import FLOATS
from scaled_mm.rowwise.norm import rms_norm
from scaled_mm.rowwise.router import MOST_CHOICES, MOST_EXPERTS, topk_softmax

# In a decoder layer: the norm, and the module whose linear layers are all that read it, by the names that transformers uses.
NORMS = {
    "input_layernorm": ("self_attn", ("q_proj", "k_proj", "v_proj"), ("qkv_proj",)),
    "post_attention_layernorm": ("mlp", ("gate_proj", "up_proj"), ("gate_up_proj",)),
}

# |fused - before| / |before| of what a decoder layer adds to a token, and of an MLP's outputs: quantization differs in single values. MLP_MAY_GROW is
# the bound of |<fused, before> / |before|^2 - 1|, which finds an MLP that multiplies its result.
MAY_DIFFER, TOKEN_MAY_DIFFER = 0.1, 0.5  # of most tokens, of any token
MLP_MAY_DIFFER, MLP_MAY_GROW = 0.05, 0.005


@dataclasses.dataclass
class Fused:
    """What `fuse_` has changed: names of norms that quantize their result, of feed-forward networks that became one module, and of routers."""

    norms: list[str]
    mlps: list[str]
    routers: list[str]


@torch.no_grad()
def fuse_(model: torch.nn.Module) -> Fused:
    """Rewires the layers of a quantized model, in place: a norm quantizes its result once for the layers that read it; gate and up become one linear
    layer, and the activation quantizes its result for down; the router of a mixture with `Int8Experts` becomes an `nn.SoftmaxRouter`.

    model: decoder layers with transformers' names (Llama, Mistral, Qwen2, Qwen3, Phi3 and similar), from `quantize_`, `from_pretrained` or
    `convert_`. Not fused: a norm that does not compute `rms_norm`, that a router reads, or whose linear layers have dynamic asymmetric inputs or
    different input scales; an MLP whose down_proj has asymmetric inputs, or whose gate and up quantize differently; a router whose
    weights are not the softmax over all experts, renormalized or not (Mixtral's, Qwen2's and Qwen3's are), or whose weight has another dtype than its
    input; modules that have forward hooks or a forward of their own, and norms whose linear layers have. The new router is also of the old one's
    class, so `output_router_logits` still works.

    The fused operators quantize the float32 result without rounding it to the model's dtype first, so outputs differ within the quantization error.
    Save the model before fusing: `save_pretrained` refuses fused models. Raises BadParamError, with the model unchanged, if a weight is on the meta
    device, if the model does not run on token ids alone, if nothing can be fused, or if a fused layer's outputs for a few tokens differ by more than
    the quantization error.
    """
    if not isinstance(model, torch.nn.Module):
        raise BadParamError(f"model: expected a torch.nn.Module, got a {type(model).__name__}")
    prefix, blocks = blocks_of(model)
    done = Fused([], [], [])
    if any(
        not isinstance(getattr(block, "input_layernorm", None), torch.nn.Module) or hasattr(block, "pre_feedforward_layernorm") for block in blocks
    ):
        norms = {}  # post_attention_layernorm then is not what the MLP reads (OLMo 2, EXAONE 4, Gemma)
    else:
        norms = NORMS
    check_in_memory(model)
    before = [(module, dict(module._modules)) for block in blocks for module in block.modules()]
    calls = _calls(model, blocks)
    try:
        with _evaluating(model):
            for index, (block, call) in enumerate(zip(blocks, calls)):
                if call is not None:
                    _fuse_block(f"{prefix}.{index}", block, call, norms, done)
        if not (done.norms or done.mlps or done.routers):
            what = f"int8 decoder layers with {', '.join(NORMS)} before self_attn and mlp"
            raise BadParamError(f"model: expected {what}, got a {type(model).__name__} without")
        with _explained(_EXPECTED):
            trial(model)  # what is outside of the layers may read them too
    except BaseException:  # whatever it is, the model stays as it was
        for module, children in before:
            module._modules.update(children)
        raise
    return done


_EXPECTED = "model: expected decoder layers whose norms and MLPs do only what those of Llama do"


@dataclasses.dataclass
class _Call:
    """The arguments of a decoder layer in a trial, without KV caches, which would grow."""

    arguments: tuple
    options: dict

    def hidden(self) -> torch.Tensor:
        return tensors_of((self.arguments, self.options.get("hidden_states"), self.options))[0]

    def run(self, block: torch.nn.Module) -> torch.Tensor:
        return tensors_of(block(*self.arguments, **self.options))[0]


def _calls(model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> list[_Call | None]:
    """What each decoder layer gets when the model runs on a few tokens; None for one that is not called."""
    found: list[_Call | None] = [None] * len(blocks)

    def keep(index: int, block, arguments: tuple, options: dict) -> None:
        found[index] = _Call(arguments, {name: without_cache(name, value) for name, value in options.items()})

    handles = [block.register_forward_pre_hook(functools.partial(keep, index), with_kwargs=True) for index, block in enumerate(blocks)]
    try:
        with _explained("model: expected one that runs on token ids"):
            trial(model)
    finally:
        for handle in handles:
            handle.remove()
    return found


@contextlib.contextmanager
def _explained(expected: str, where: str = "") -> Iterator[None]:
    """Whatever the model raises becomes a BadParamError."""
    try:
        yield
    except Exception as error:
        if lacks_memory(error):
            raise  # not the model's fault
        raise BadParamError(f"{expected}, got {type(error).__name__}{where}: {error}") from error


def _fuse_block(name: str, block: torch.nn.Module, call: _Call, norms: dict, done: Fused) -> None:
    """Fuses a decoder layer, and compares its outputs before and after: names of modules do not say what else a layer does with a norm's result."""
    count = sum(map(len, (done.norms, done.mlps, done.routers)))
    with _explained("model: expected decoder layers that run without a KV cache", f" in {name}"):
        wanted = call.run(block)
    for norm, (parent, *readers) in norms.items():
        if _fuse_norm(block, norm, parent, readers):
            done.norms.append(f"{name}.{norm}")
    if _fuse_mlp(block):
        done.mlps.append(f"{name}.mlp")
    done.routers += [f"{name}.{router}" for router in _fuse_routers(block, call.hidden().dtype)]
    if count == sum(map(len, (done.norms, done.mlps, done.routers))):
        return
    with _explained(_EXPECTED, f" in {name}"):
        found = call.run(block)
    hidden, error = call.hidden().float(), (found.float() - wanted.float()).norm(dim=-1)
    added, rounding = (wanted.float() - hidden).norm(dim=-1), 4 * torch.finfo(wanted.dtype).eps * wanted.float().norm(dim=-1)
    # A router may send a token elsewhere if two experts are equally good for it, so of a mixture most tokens count.
    routes = any(isinstance(module, Int8Experts) for module in block.modules())
    if not ((error <= MAY_DIFFER * added + rounding).float().mean() > 0.5 and (routes or (error <= TOKEN_MAY_DIFFER * added + rounding).all())):
        typical, worst = (float(value) for value in ((error / added).median(), (error / added).max()))
        got = f"outputs of {name} that differ by {typical:.2g} (median) to {worst:.2g} of what it adds to a token"
        raise BadParamError(f"{_EXPECTED}, got {got}")


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module in model.modules():
            module.training = before.get(module, before[model])


@contextlib.contextmanager
def _kept(model: torch.nn.Module) -> Iterator[None]:
    """Sets the attributes of all modules back afterwards."""
    inside = ("_modules", "_parameters", "_buffers")
    before = [(module, dict(vars(module)), {name: dict(vars(module)[name]) for name in inside}) for module in model.modules()]
    try:
        yield
    finally:
        for module, fields, contents in before:
            vars(module).clear()
            vars(module).update(fields)
            for name, content in contents.items():
                fields[name].clear()
                fields[name].update(content)


def trial_ids(model: torch.nn.Module) -> torch.Tensor:
    """The ids of a few tokens, [1, 8], spread over the vocabulary: the first ones are often special tokens, and for SmolLM2's a difference of 1e-6 in
    the embeddings becomes one of 0.9 in the logits."""
    count = getattr(getattr(model, "get_input_embeddings", lambda: None)(), "num_embeddings", 9)
    return (torch.arange(1, 9, device=next(model.parameters()).device) * max(1, count // 9) % count)[None]


@torch.no_grad()
def trial(model: torch.nn.Module) -> torch.Tensor:
    """What the model computes for a few tokens, without dropout. Attributes that it sets meanwhile are set back, as BigBird's, which takes another
    attention for few tokens."""
    with _evaluating(model), _kept(model):
        result = model(trial_ids(model))
    named = [getattr(result, name, None) for name in ("logits", "last_hidden_state")]
    tensors = tensors_of([*named, result if isinstance(result, (torch.Tensor, tuple, list, dict)) else None])
    if not tensors:
        raise BadParamError(f"model: expected one that returns a tensor, logits or hidden states, got {type(result).__name__}")
    return tensors[0].float()


def _fuse_norm(block: torch.nn.Module, name: str, parent: str, readers) -> bool:
    norm, module = getattr(block, name, None), getattr(block, parent, None)
    if norm is None or module is None or isinstance(norm, RMSNorm) or is_patched(norm):
        return False
    children = next((names for names in readers if all(isinstance(getattr(module, child, None), Int8Linear) for child in names)), None)
    if children is None:
        return False
    layers = [getattr(module, child) for child in children]
    others = [child for child, inner in module.named_children() if isinstance(inner, (torch.nn.Linear, Int8Linear)) and child not in children]
    asymmetric = any(not layer.symmetric and layer.input_scale is None for layer in layers)
    if asymmetric or any(map(is_patched, layers)) or any(child not in ("o_proj", "down_proj") for child in others):
        return False
    facts = {(layer.input_scale is None, _value(layer.input_scale), _value(layer.input_zero_point)) for layer in layers}
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if len(facts) > 1 or not isinstance(epsilon, float) or not is_rms_norm(norm, epsilon):
        return False
    layer = layers[0]
    options = dict(quantize="token" if layer.input_scale is None else "static", symmetric=layer.input_zero_point is None, device="meta")
    made = RMSNorm(norm.weight.shape[0], epsilon, dtype=norm.weight.dtype, **options)
    made.weight = norm.weight
    for field in ("input_scale", "input_zero_point"):
        value = getattr(layer, field)
        setattr(made, field, None if value is None else torch.nn.Parameter(value.clone(), requires_grad=False))
    replace(block, name, made)
    return True


def _value(tensor: torch.Tensor | None) -> float | None:
    return None if tensor is None else float(tensor)


def is_rms_norm(norm: torch.nn.Module, epsilon: float) -> bool:
    weight = getattr(norm, "weight", None)
    if weight is None or weight.dim() != 1 or getattr(norm, "bias", None) is not None:
        return False
    x = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    ours, theirs = rms_norm(x, weight, epsilon).float(), norm(x).float()
    return torch.allclose(ours, theirs, rtol=4 * torch.finfo(weight.dtype).eps, atol=1e-6)


def _has_shards(module: torch.nn.Module) -> bool:
    """Whether a rank has parts of its weights (scaled_mm.parallel): the quantizer then needs the scale of the whole row."""
    return any(isinstance(inner, Int8Linear) and inner.is_shard for inner in module.modules())


def _fuse_mlp(block: torch.nn.Module) -> bool:
    mlp = getattr(block, "mlp", None)
    down, act = getattr(mlp, "down_proj", None), getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    if not isinstance(down, Int8Linear) or not down.symmetric or act is None or _has_shards(mlp) or any(map(is_patched, mlp.children())):
        return False
    both = getattr(mlp, "gate_up_proj", None)
    if both is None:
        gate, up = getattr(mlp, "gate_proj", None), getattr(mlp, "up_proj", None)
        if not isinstance(gate, Int8Linear) or not isinstance(up, Int8Linear) or (gate.bias is None) != (up.bias is None):
            return False
        both = _joined(gate, up)
    if not isinstance(both, Int8Linear):
        return False
    try:
        made = GatedMLP(both, down, name_of_activation(act))
    except BadParamError:
        return False
    if not _computes_the_same(made, mlp, both):
        raise BadParamError(f"{_EXPECTED}, got a {type(mlp).__name__} that computes something else than down({made.activation}(gate) * up)")
    if is_patched(mlp):
        return False
    replace(block, "mlp", made)
    return True


def _computes_the_same(made: GatedMLP, mlp: torch.nn.Module, both: Int8Linear) -> bool:
    """Whether an MLP computes what its replacement does, within the quantization error, for random tokens of several magnitudes: it may clamp, scale
    or normalize something."""
    x = torch.randn(1, 4, both.in_features, generator=torch.Generator().manual_seed(0)).to(both.weight.device)
    for scale in (0.1, 1.0, 10.0, 100.0):
        try:
            theirs, ours = mlp(scale * x), made(scale * x)
        except Exception as error:  # noqa: BLE001 - whatever it raises, it is no such MLP
            if lacks_memory(error):
                raise
            return False
        size = theirs.norm()
        if size != 0 and not ((ours - theirs).norm() < MLP_MAY_DIFFER * size and abs((ours * theirs).sum() / size**2 - 1) < MLP_MAY_GROW):
            return False
    return True


def _joined(gate: Int8Linear, up: Int8Linear) -> Int8Linear | None:
    """gate and up as one linear layer, or None if their inputs are quantized differently."""
    if (
        gate.symmetric != up.symmetric
        or _value(gate.input_scale) != _value(up.input_scale)
        or _value(gate.input_zero_point) != _value(up.input_zero_point)
    ):
        return None
    bias = None if gate.bias is None else torch.cat([gate.bias, up.bias])
    weights = torch.cat([gate.weight, up.weight]), torch.cat([gate.weight_scale, up.weight_scale])
    return Int8Linear.from_tensors(*weights, bias, gate.input_scale, gate.input_zero_point, symmetric=gate.symmetric)


def _fuse_routers(block: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """The names of the routers that it has replaced. dtype: of what they read."""
    replaced = {}
    for name, parent in block.named_modules():
        experts = getattr(parent, "experts", None)
        if not isinstance(experts, Int8Experts) or experts.is_shard:
            continue
        for child, module in parent.named_children():
            if not is_patched(module) and (made := _softmax_router(module, dtype)):
                replaced[f"{name}.{child}" if name else child] = parent, child, made
    for parent, child, made in replaced.values():
        replace(parent, child, made)
    return list(replaced)


def _softmax_router(router: torch.nn.Module, dtype: torch.dtype) -> SoftmaxRouter | None:
    """What computes the same as a router, which returns logits, weights and experts; or None."""
    tensors = dict(router.named_parameters()) | dict(router.named_buffers())
    weight = tensors.get("weight")
    if isinstance(router, SoftmaxRouter) or list(tensors) != ["weight"] or weight.dim() != 2 or weight.dtype not in FLOATS:
        return None
    experts, hidden = weight.shape
    x = torch.randn(64, hidden, generator=torch.Generator().manual_seed(0)).to(weight.device, dtype)
    for renormalize in (True, False):
        try:
            if experts <= MOST_EXPERTS and all(_computes_topk_softmax(router, x * scale, renormalize) for scale in (1, 4)):
                choices = router(x)[2].shape[1]
                made = SoftmaxRouter(hidden, experts, choices, renormalize=renormalize, dtype=weight.dtype, device="meta")
                made.weight = weight
                made.__class__ = _also(type(router))
                return made
        except Exception as error:  # noqa: BLE001 - whatever it raises, it is no router
            if lacks_memory(error):
                raise
            return None
    return None


@functools.cache
def _also(router_class: type[torch.nn.Module]) -> type[SoftmaxRouter]:
    """SoftmaxRouter as a subclass of a router's class too."""
    return type("SoftmaxRouter", (SoftmaxRouter, router_class), {"__reduce_ex__": lambda self, _: (_restored, (router_class, self.__dict__))})


def _restored(router_class: type[torch.nn.Module], state: dict) -> SoftmaxRouter:
    made = SoftmaxRouter.__new__(_also(router_class))
    made.__setstate__(state)
    return made


def _computes_topk_softmax(router: torch.nn.Module, x: torch.Tensor, renormalize: bool) -> bool:
    """Whether it does for these tokens. Which of several equal logits it takes does not count."""
    found = router(x)
    if not isinstance(found, tuple) or len(found) != 3:
        return False
    logits, weights, ids = found
    if not torch.equal(logits, torch.nn.functional.linear(x, router.weight)) or not 1 <= ids.shape[-1] <= MOST_CHOICES:
        return False
    ours, chosen = topk_softmax(logits, ids.shape[-1], renormalize=renormalize)
    same_experts = torch.equal(*(logits.gather(-1, each.long()) for each in (chosen, ids)))
    return same_experts and torch.allclose(ours, weights.float(), rtol=2 * torch.finfo(weights.dtype).eps + 2**-14, atol=1e-6)
