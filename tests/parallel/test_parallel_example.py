"""`examples/generate_parallel.py`, as the guide runs it: the same text by one process, and by two that torchrun starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from operands.tiny_models import SIZES, tokens, transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import scaled_mm as sm

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "generate_parallel.py"


def test_one_process_and_two_write_the_same_text(tmp_path):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**SIZES), dtype=torch.float32).eval()
    sm.quantize_(model, sm.Int8Config(), tokens(), progress=False)
    sm.save_pretrained(model, tmp_path / "int8")
    vocabulary = models.WordLevel({word: index for index, word in enumerate(["<unk>", *"abcdefgh"])}, unk_token="<unk>")
    tokenizer = Tokenizer(vocabulary)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / "int8")
    words = [str(EXAMPLE), str(tmp_path / "int8"), "1,2,3", "--tokens", "8"]
    one = [sys.executable, *words]
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    text = [sys.executable, str(EXAMPLE), str(tmp_path / "int8"), "a b c", "--tokens", "8", "--whole-attention"]
    printed = [subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200) for command in (one, two, text)]
    assert all(run.returncode == 0 for run in printed), printed
    assert printed[2].stdout.startswith("a b c")
    assert printed[0].stdout == printed[1].stdout and printed[0].stdout.startswith("1,2,3,") and printed[0].stdout.count(",") == 10
