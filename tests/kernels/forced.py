"""The tables of all architectures, and the architecture under which a GPU runs the kernel configs of newer ones."""

from __future__ import annotations

import torch

from scaled_mm.tables import available_tables, load_table

TABLES = {arch: load_table(arch) for arch, _ in available_tables()}
SUFFIXES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "int32"}
BORROWER = "sm80"
