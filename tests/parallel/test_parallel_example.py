"""`examples/generate_parallel.py`, as the guide runs it: the same text by one process, and by two that torchrun starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from operands.tiny_models import SIZES, tokens, transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import scaled_mm as sm

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "generate_parallel.py"


THREADS_AT_EXIT = """
import atexit, os, runpy, sys
def threads():
    return [name for task in os.listdir("/proc/self/task") if "gloo" in (name := open(f"/proc/self/task/{task}/comm").read())]
atexit.register(lambda: print("gloo threads at exit:", len(threads())))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("example") / "int8"
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**SIZES), dtype=torch.float32).eval()
    sm.quantize_(model, sm.Int8Config(), tokens(), progress=False)
    sm.save_pretrained(model, path)
    vocabulary = models.WordLevel({word: index for index, word in enumerate(["<unk>", *"abcdefgh"])}, unk_token="<unk>")
    tokenizer = Tokenizer(vocabulary)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)
    return path


def printed(*words: str | Path, **variables: str) -> str:
    """What `python words` prints. Asserts that it succeeds."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    run = subprocess.run([sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_one_process_and_two_write_the_same_text(checkpoint):
    words = [EXAMPLE, checkpoint, "1,2,3", "--tokens", "8"]
    one = printed(*words)
    assert one.startswith("1,2,3,") and one.count(",") == 10
    assert printed("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words) == one
    assert printed(EXAMPLE, checkpoint, "a b c", "--tokens", "8", "--whole-attention").startswith("a b c")


def test_no_thread_of_gloo_outlives_the_example(checkpoint):
    """One that frees its last tensor while Python ends aborts the process: one run of ten failed on a busy machine."""
    rank = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    found = printed("-c", THREADS_AT_EXIT, EXAMPLE, checkpoint, "1,2,3", "--tokens", "2", **rank)
    assert found.startswith("1,2,3,") and found.endswith("gloo threads at exit: 0\n")
