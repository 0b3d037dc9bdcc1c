"""transformers loads w8a8_int8 checkpoints with int8 layers once this module is imported.

    import scaled_mm.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained("owner/model-w8a8-int8")

Dense models only. `scaled_mm.from_pretrained` loads experts too; `scaled_mm.convert_` is for compressed-tensors. Imports transformers, 5 or newer.
"""

from __future__ import annotations

import torch
from safetensors import safe_open
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from scaled_mm.errors import BadParamError
from scaled_mm.models.blocks import experts_of, replace
from scaled_mm.models.scheme import read
from scaled_mm.nn.linear import Int8Linear

METHOD = "w8a8_int8"


def _check_int8(schemes, files) -> None:
    """BadParamError for a weight with a scale that is not int8: transformers would convert it without a word."""
    dtypes = {}
    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, "pt") as tensors:
                dtypes |= {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}
    for name, dtype in dtypes.items():
        layer = name.removesuffix(".weight")
        if layer != name and f"{layer}.weight_scale" in dtypes and dtype != "I8" and schemes.of(layer) is not None:
            raise BadParamError(f"{name}: expected int8 in the checkpoint, got {dtype}")


@register_quantization_config(METHOD)
class W8A8Int8Config(QuantizationConfigMixin):
    """`quantization_config` of a w8a8_int8 checkpoint. ignore: names, or "re:" patterns, of linear layers that are not quantized."""

    def __init__(self, ignore=(), is_dynamic: bool = True, packed_modules_mapping=None, **_):
        self.quant_method = METHOD
        self.ignore = list(ignore or ())
        self.is_dynamic = is_dynamic
        self.packed_modules_mapping = dict(packed_modules_mapping or {})


@register_quantizer(METHOD)
class W8A8Int8Quantizer(HfQuantizer):
    """Puts `scaled_mm.nn.Int8Linear` in the place of linear layers before the weights are loaded."""

    requires_calibration = True

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **_):
        if experts_of(model):
            raise BadParamError("model: expected one without experts; scaled_mm.from_pretrained loads int8 experts")
        schemes = read(self.quantization_config.to_dict(), "config.json")
        head = model.get_output_embeddings()
        _check_int8(schemes, checkpoint_files or ())
        prefix = model.base_model_prefix
        outer = f"{prefix}." if prefix and not hasattr(model, prefix) else ""  # of a model without its head, which has shorter names
        for name, linear in [(name, module) for name, module in model.named_modules() if type(module) is torch.nn.Linear]:
            if linear is not head and schemes.of(outer + name) is not None:
                options = dict(device=linear.weight.device, dtype=linear.weight.dtype)
                replace(model, name, Int8Linear(linear.in_features, linear.out_features, linear.bias is not None, **options))

    def _process_model_after_weight_loading(self, model, **_):
        for name, layer in [(name, module) for name, module in model.named_modules() if isinstance(module, Int8Linear)]:
            for tensor, parameter in layer.named_parameters():
                if not getattr(parameter, "_is_hf_initialized", False):  # transformers marks what it loaded; the rest has uninitialized memory
                    raise BadParamError(f"{name}.{tensor}: expected it in the checkpoint, got a checkpoint without it")
            if not bool((torch.isfinite(layer.weight_scale) & (layer.weight_scale > 0)).all()):
                raise BadParamError(f"{name}.weight_scale: expected finite positive scales in the checkpoint, got others")
        return model

    def get_new_dtype(self, converter, param, dtype):
        """The dtype that a tensor of the checkpoint is converted to. None for int8 tensors: they stay int8."""
        return None if param is not None and getattr(param, "get_dtype", lambda: "")() == "I8" else dtype

    def is_serializable(self, *_):
        """`scaled_mm.save_pretrained` saves such models."""
        return False

    @property
    def is_trainable(self) -> bool:
        """There are no gradients."""
        return False
